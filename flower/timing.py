"""Overrides of Flower's hard-coded waits, and of one costly cleanup.

An idle SuperNode of these Flowers polls for messages every 3 s and for a ClientApp's reply every
0.5 s; it waits 1 s before it retries to pull an object that has not arrived. Each override checks
Flower's version and that the code it replaces still exists; if not, it warns, changes nothing and
returns False.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from logging import WARNING
from types import ModuleType

from flwr.common import log

from flwr_distill.node.pace import Pace

FLOWER_VERSIONS = ("1.32.1", "1.41.0", "1.42.0")
IDLE_SLEEP = 3
REPLY_SLEEP = 0.5
"""Flower's sleeps in the SuperNode's loop, in seconds; `_PacedTime` tells them apart by value."""


def patch_pull_backoff(*, initial: float = 0.02, cap: float = 0.25) -> bool:
    """Retry sooner to pull an object that has not arrived: every `initial` to `cap` seconds.

    Flower waits 1 to 10 s.
    """
    from flwr.supercore.inflatable import inflatable_utils

    # With shorter waits, Flower's limit on the number of tries would cut off slow links.
    changes = {"initial_backoff": initial, "backoff_cap": cap, "max_tries_per_object": None}
    names = ("pull_objects", "pull_and_inflate_object_from_tree")
    functions = [getattr(inflatable_utils, name, None) for name in names]
    defaults = [getattr(function, "__kwdefaults__", None) or {} for function in functions]
    present = all(changes.keys() <= each.keys() for each in defaults)
    if not can_override("the pull back-off", present):
        return False
    for each in defaults:
        each.update(changes)
    return True


def patch_supernode_sleep(pace: Pace, *, reply_poll: float = 0.02) -> bool:
    """Let the SuperNode poll for messages at `pace`, and for replies every `reply_poll` seconds.

    Waiting for a reply counts as work.
    """
    from flwr.supernode import start_client_internal

    present = getattr(start_client_internal, "time", None) is time
    if not can_override("the SuperNode's sleep", present):
        return False
    setattr(start_client_internal, "time", _PacedTime(pace, reply_poll))  # noqa: B010 (not exported)
    return True


def patch_nonce_cleanup(*, every: float = 30.0) -> bool:
    """Let the SuperNode remove expired nonces every so many seconds only.

    With a secret on its ClientAppIo API, Flower checks those of five minutes at each poll.
    """
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState as State

    present = hasattr(State, "_cleanup_expired_nonces")
    if not can_override("the cleaning of nonces", present):
        return False
    clean_up = State._cleanup_expired_nonces
    due = 0.0

    def clean_up_sometimes(self: State) -> None:
        nonlocal due
        if time.monotonic() > due:
            clean_up(self)
            due = time.monotonic() + every

    setattr(State, "_cleanup_expired_nonces", clean_up_sometimes)  # noqa: B010
    return True


class _PacedTime(ModuleType):
    """Replaces the module `time` in the SuperNode's loop."""

    def __init__(self, pace: Pace, reply_poll: float) -> None:
        super().__init__("time")
        self._pace = pace
        self._reply_poll = reply_poll

    def sleep(self, seconds: float) -> None:
        if seconds == IDLE_SLEEP:
            time.sleep(self._pace.draw())
        elif seconds == REPLY_SLEEP:
            self._pace.worked()
            time.sleep(self._reply_poll)
        else:
            time.sleep(seconds)

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def can_override(name: str, present: bool) -> bool:
    """Whether Flower's code is unchanged since its override was written; else warn."""
    installed = version("flwr")
    if installed in FLOWER_VERSIONS and present:
        return True
    log(
        WARNING,
        "%s stays Flower's own, which is slower or may hang: flwr %s is installed, the override "
        "was written for %s%s",
        name,
        installed,
        ", ".join(FLOWER_VERSIONS),
        "" if present else ", and the code it replaces has moved",
    )
    return False
