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
    """The app bundle that would answer a message."""

    name: str
    """Its SHA-256, as the SuperLink says; empty without a bundle."""
    content: bytes | None
    """None for an app that is installed here, as in a simulation: there is no bundle to judge."""
    signed: bool
    """Whether one of the policy's publishers has signed it."""
    overrides: Mapping[str, Any]
    """Values of the run config that the run sets itself; without a bundle, all values."""


@dataclass(frozen=True)
class Answer:
    """What an app replies, and what leaves in its place: content, or an error."""

    content: RecordDict | None
    code: int = 0
    """Of the error."""
    reason: str = ""
    """Of the error, for the caller."""
    note: str = ""
    """For the node's log."""
