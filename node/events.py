"""What the guard of a node judges, and its verdicts (`node.guard`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict


@dataclass(frozen=True)
class Header:
    """Which message of which run has come, for which node."""

    message_id: str
    message_type: str
    run_id: int
    node_id: int


@dataclass(frozen=True)
class Bundle:
    """The app bundle that would answer a message.

    Parameters
    ----------
    name : str
        Its SHA-256, as the SuperLink says.
    signed : bool
        Whether one of the policy's publishers has signed it.
    overrides : Mapping[str, bool | int | float | str]
        Values of the run config that the run sets itself.
    """

    name: str
    content: bytes
    signed: bool
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What an app replies, and what leaves in its place: content, or an error.

    Parameters
    ----------
    content : RecordDict | None
        None for an error.
    code : int (default: 0)
        Of the error.
    reason : str (default: "")
        Of the error, for the caller.
    note : str (default: "")
        What the node's log says of it.
    """

    content: RecordDict | None
    code: int = 0
    reason: str = ""
    note: str = ""
