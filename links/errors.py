"""The error of links."""

from flwr_distill.task.errors import ReportedError


class LinkError(ReportedError, ValueError):
    """A parcel could not be sent, or was rejected."""
