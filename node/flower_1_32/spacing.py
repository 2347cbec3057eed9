"""How the server spaces a node's polls for messages.

Apart from `timing`, which the worker imports too: there, names of our other packages are the app
bundle's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord
from flwr.supercore.inflatable.inflatable_object import get_object_type_from_object_content

from flwr_distill.node.flower.timing import can_override
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.messages import POLL_EVERY

SMALL_RECORD = 256
"""Bytes of an object beyond which it is no record about the pace."""


def patch_spacing(pace: Pace) -> bool:
    """Let the server space this node's polls for messages, by a record in what it sends.

    Without one in a message, the node polls at its own pace.
    """
    from flwr.supernode import start_client_internal

    present = hasattr(start_client_internal, "_pull_and_store_message")
    if not can_override("the SuperNode's intake", present):
        return False
    pull_and_store: Callable[..., int | None] = start_client_internal._pull_and_store_message

    def pull_and_store_message(
        *, pull_object: Callable[[int, str], bytes], **others: Any
    ) -> int | None:
        reading = ReadingPull(pull_object)
        if (run_id := pull_and_store(pull_object=reading, **others)) is not None:
            pace.space(reading.spacing)
        return run_id

    setattr(start_client_internal, "_pull_and_store_message", pull_and_store_message)  # noqa: B010
    return True


class ReadingPull:
    """Pulls a message's objects, and reads in them how the server spaces this node's polls.

    Attributes
    ----------
    spacing : float
        Seconds between polls; 0 without a word about it.
    """

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
