"""How the server spaces a node's polls for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord
from flwr.supercore.inflatable.inflatable_object import get_object_type_from_object_content

from flwr_distill.flower.loop import Step
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.messages import POLL_EVERY

SMALL_RECORD = 256
"""Bytes of an object beyond which it is not a record about the pace."""


class Spacing(Step):
    """Lets the server space this node's polls, by a record in a message.

    Without one in a message, the node polls at its own pace.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message, and read how it spaces polls."""
        reading = ReadingPull(named["pull_object"])
        if (run_id := inner(**{**named, "pull_object": reading})) is not None:
            self._pace.space(reading.spacing)
        return run_id


class ReadingPull:
    """Pulls a message's objects; `spacing` is what they set as seconds between polls, else 0."""

    def __init__(self, pull_object: Callable[[int, str], bytes]) -> None:
        self._pull_object = pull_object
        self.spacing = 0.0

    def __call__(self, run_id: int, object_id: str) -> bytes:
        """Pull an object."""
        content = self._pull_object(run_id, object_id)
        if (
            len(content) <= SMALL_RECORD
            and get_object_type_from_object_content(content) == ConfigRecord.__name__
        ):
            seconds = ConfigRecord.inflate(content).get(POLL_EVERY)
            self.spacing = seconds if isinstance(seconds, float) else self.spacing
        return content
