"""Errors of distillation."""

from flwr_distill.task.errors import ReportedError


class DistillError(ReportedError, ValueError):
    """A distillation is not possible with these arguments."""


class VirtualDataError(DistillError):
    """Virtual data is malformed or does not fit the task."""


def require(
    condition: bool,
    problem: str,
    *,
    where: str = "virtual data",
    value: object = None,
    remedy: str = "",
) -> None:
    """Raise a VirtualDataError unless the condition is met."""
    if not condition:
        raise VirtualDataError(problem, where=where, value=value, remedy=remedy)
