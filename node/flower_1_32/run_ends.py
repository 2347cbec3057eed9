"""Learns which runs have ended, and removes what others sent to this node for them.

Flower tells nodes nothing of the end of a run. It only refuses to describe a run that has ended, so
the SuperNode asks now and then about those that have files of links here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

from flwr.common import log
from flwr.supercore.run import RunNotRunningException

from links.folder import remove_links, runs_with_links
from node.flower.timing import can_override
from node.kernel import trim_heap

EVERY = 60.0
"""Seconds between questions to the SuperLink, about: a thousand nodes are not to ask at once."""
MAX_QUESTIONS = 50
"""Questions at a time: a hostile app can make folders for any number of runs."""


def patch_run_ends(state_dir: Path, *, every: float = EVERY) -> bool:
    """Have the SuperNode's loop remove the links' files of runs that have ended."""
    from flwr.supernode import start_client_internal

    present = hasattr(start_client_internal, "_pull_and_store_message")
    if not can_override("the SuperNode's intake", present):
        return False
    pull_and_store: Callable[..., int | None] = start_client_internal._pull_and_store_message
    due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def pull_and_store_message(*, get_run: Callable[[int], Any], **others: Any) -> int | None:
        nonlocal due
        if time.monotonic() > due:
            remove_links_of_ended_runs(state_dir, get_run)
            trim_heap()  # of a run's bundles and messages
            due = time.monotonic() + every * random.uniform(0.8, 1.2)
        return pull_and_store(get_run=get_run, **others)

    setattr(start_client_internal, "_pull_and_store_message", pull_and_store_message)  # noqa: B010
    return True


def remove_links_of_ended_runs(state_dir: Path, get_run: Callable[[int], Any]) -> None:
    """Remove keys, spent tokens and uncollected parcels of runs that have ended.

    Parameters
    ----------
    state_dir : Path
        The node's state directory.
    get_run : Callable[[int], Run]
        The SuperLink's description of a run; RunNotRunningException if it has ended.
    """
    for run_id in runs_with_links(state_dir, MAX_QUESTIONS):
        try:
            get_run(run_id)
        except RunNotRunningException:
            log(INFO, "Run %s has ended: its links are removed", run_id)
            remove_links(state_dir, run_id)
        except Exception as error:  # the SuperLink cannot say: it may later
            log(DEBUG, "Run %s: %s", run_id, error)
