"""The error of links."""


class LinkError(ValueError):
    """A parcel could not be sent, or was rejected."""
