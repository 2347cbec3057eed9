"""Sends a phase's messages in batches, so that nodes find what a message holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

BATCH = 16
"""Messages that a SuperLink takes in before their objects are sent."""


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Push messages to a SuperLink; return their ids.

    A SuperLink stores equal objects once, but shows a message to its node before it has them, and
    the node asks again and again. So the first message goes alone, with what the others share,
    and then a few at a time.
    """
    return [name for batch in batches(messages) for name in grid.push_messages(batch)]


def batches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the first message alone, then the others by `BATCH`."""
    yield messages[:1]
    for start in range(1, len(messages), BATCH):
        yield messages[start : start + BATCH]
