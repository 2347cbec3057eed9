"""How Flower pulls objects of a message that have not all arrived.

A message is announced first, and its objects follow. Nodes pull messages so, and servers replies.
"""

from __future__ import annotations

from typing import Any

from flwr.supercore.inflatable import inflatable_utils

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


def _defaults() -> list[dict[str, Any]]:
    """Default arguments of Flower's functions, which can be changed."""
    functions = [getattr(inflatable_utils, name, None) for name in NAMES]
    return [getattr(function, "__kwdefaults__", None) or {} for function in functions]
