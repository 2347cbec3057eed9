"""The exceptions of this package.

::

    ValueError
    └── DistillError          a distillation cannot be done as asked
        └── VirtualDataError  virtual data is malformed or does not fit
"""


class DistillError(ValueError):
    """A distillation cannot be done as asked; the message names the value and the remedy."""


class VirtualDataError(DistillError):
    """Virtual data is malformed, or does not fit the task it is meant for."""
