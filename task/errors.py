"""Errors that a reader can act on: where, value, what to do.

    ReportedError
    ├── DatasetError    data is missing, unreadable or unusable
    ├── ModelError      a model is unknown or does not fit the data
    └── SettingsError   a setting is unknown, of the wrong type or out of range

The module imports no torch: a node's supervisor reports these errors too.
"""

from pathlib import PurePath

MAX_SHOWN = 300
"""Characters of a value that an error shows; a hostile node may send thousands."""


REMEDIES = {
    **dict.fromkeys(
        ("ImportError", "ModuleNotFoundError"),
        "install it for the Python that runs ServerApps, or correct the app",
    ),
    "MemoryError": "that machine's memory is used up: give it more, or take a smaller model",
}
"""Of a ServerApp's errors, by type, for which its machine is to blame, not its code."""


def with_remedy(name: str, text: str) -> str:
    """An error's type and text on one line, with the remedy if there is one."""
    remedy = REMEDIES.get(name)
    return f"{name}: {text} ({remedy})" if remedy else f"{name}: {text}"


class ReportedError(Exception):
    """An error whose reader learns its place, the value there and how to fix it.

    Its text is ``where = value: problem (remedy)``; parts without content are left away.

    Parameters
    ----------
    problem : str
        What is wrong, as in ``must be > 0``.
    where : object (default: "")
        The setting, file, record or node that is wrong. Kept as text.
    value : object (default: None)
        The value there; None shows nothing.
    remedy : str (default: "")
        What its reader can do, as in ``try 0.1 for strong label skew``.

    Examples
    --------
    >>> print(ReportedError("must be > 0", where="partition.alpha", value=-1, remedy="try 0.1"))
    partition.alpha = -1: must be > 0 (try 0.1)
    """

    def __init__(
        self, problem: str, *, where: object = "", value: object = None, remedy: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = str(where)
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        place = self.where
        if self.value is not None:
            value = str(self.value) if isinstance(self.value, PurePath) else self.value
            place += f" = {repr(value)[:MAX_SHOWN]}"
        text = f"{place}: {self.problem}" if place else self.problem
        return f"{text} ({self.remedy})" if self.remedy else text


class DatasetError(ReportedError, ValueError):
    """Data is missing, unreadable or unusable."""


class ModelError(ReportedError, ValueError):
    """A model is unknown or does not fit the data."""


class SettingsError(ReportedError, ValueError):
    """A setting is unknown, of the wrong type or out of range.

    Parameters
    ----------
    source : str (default: "")
        Where the setting came from: the run config, a file, or a message's record.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = "",
        value: object = None,
        remedy: str = "",
        source: str = "",
    ) -> None:
        super().__init__(problem, where=where, value=value, remedy=remedy)
        self.source = source

    def __str__(self) -> str:
        text = super().__str__()
        return f"{self.source}: {text}" if self.source else text
