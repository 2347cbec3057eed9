"""How Flower pulls objects of a message that have not all arrived.

A message is announced first, and its objects follow. Nodes pull messages so, and servers replies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from flwr.app import Array
from flwr.supercore.inflatable import inflatable_utils

from flwr_distill.flower.inflating import InflationError, about_array
from flwr_distill.flower.overrides import can_override

NAMES = ("pull_objects", "pull_and_inflate_object_from_tree")


def patch_pull_backoff(*, initial: float = 0.02, cap: float = 0.25) -> bool:
    """Retry sooner to pull an object that has not arrived: every `initial` to `cap` seconds.

    Flower waits 1 to 10 s.
    """
    # With shorter waits, Flower's limit on the number of tries would cut off slow links.
    changes = {"initial_backoff": initial, "backoff_cap": cap, "max_tries_per_object": None}
    present = all(changes.keys() <= each.keys() for each in _defaults())
    if not can_override("the pull back-off", present):
        return False
    for each in _defaults():
        each.update(changes)
    return True


def limit_pulls(seconds: float) -> None:
    """Give up objects that have not arrived after so many seconds, in pulls from now on.

    Flower waits two hours for what a node has announced and does not send.
    """
    for each in _defaults():
        if "max_time" in each:
            each["max_time"] = seconds


@contextmanager
def arrays_within(most: int) -> Iterator[None]:
    """Have Flower refuse messages with arrays of more bytes, in this thread, within the block.

    Their decoding raises InflationError.
    """
    inflatable_utils.inflatable_class_registry[Array.__name__] = cast(Any, _Bounded)
    _room.left = most
    try:
        yield
    finally:
        del _room.left


_room = threading.local()


class _Bounded:
    """In place of Flower's class of arrays, whose `inflate` is called for each."""

    @staticmethod
    def inflate(content: bytes, children: Mapping[str, Any]) -> Array:
        if hasattr(_room, "left"):
            _room.left -= sum(len(children[chunk].data) for chunk in about_array(content)[1])
            if _room.left < 0:
                raise InflationError("arrays of too many bytes")
        return Array.inflate(content, dict(children))


def _defaults() -> list[dict[str, Any]]:
    """Default arguments of Flower's functions, which can be changed."""
    functions = [getattr(inflatable_utils, name, None) for name in NAMES]
    return [getattr(function, "__kwdefaults__", None) or {} for function in functions]
