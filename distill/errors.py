"""Errors of distillation."""


class DistillError(ValueError):
    """A distillation is not possible; the message names the value and the remedy."""


class VirtualDataError(DistillError):
    """Virtual data is malformed or does not fit the task."""


def require(condition: bool, message: str) -> None:
    """Raise a VirtualDataError unless the condition holds."""
    if not condition:
        raise VirtualDataError(message)
