"""Tagged state of strategies, for checkpoints."""

from collections.abc import Mapping
from typing import Any

VERSION = 1


def tag(strategy: object) -> dict[str, Any]:
    """Start of a strategy's state: its class and the version of the format."""
    return {"strategy": type(strategy).__name__, "version": VERSION}


def check_tag(state: Mapping[str, Any], strategy: object) -> None:
    """Check that a state belongs to this strategy class and version.

    Raises
    ------
    ValueError
        If it does not.
    """
    wanted = (type(strategy).__name__, VERSION)
    found = (state.get("strategy"), state.get("version"))
    if found != wanted:
        raise ValueError(f"need the state of {wanted}, found that of {found}")
