"""State of a strategy that knows whose it is, for checkpoints."""

from collections.abc import Mapping
from typing import Any

VERSION = 1


def tag(strategy: object) -> dict[str, Any]:
    """What the state of a strategy begins with: its class and the version of these states.

    Parameters
    ----------
    strategy : object
        The strategy.
    """
    return {"strategy": type(strategy).__name__, "version": VERSION}


def check_tag(state: Mapping[str, Any], strategy: object) -> None:
    """Refuse the state of another strategy or version.

    Parameters
    ----------
    state : Mapping[str, Any]
        Which is to be loaded.
    strategy : object
        Into which.

    Raises
    ------
    ValueError
        If it is another strategy's or another version's.
    """
    wanted = (type(strategy).__name__, VERSION)
    found = (state.get("strategy"), state.get("version"))
    if found != wanted:
        raise ValueError(f"need the state of {wanted}, found that of {found}")
