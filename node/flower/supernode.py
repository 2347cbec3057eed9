"""Flower's SuperNode with our timing; reports its state to the supervisor."""

from __future__ import annotations

import logging
import os
import random
import sys
import tomllib
import traceback
from pathlib import Path

from flwr.supernode.cli import flower_supernode

from flwr_distill.node.flower.timing import (
    patch_intake,
    patch_nonce_cleanup,
    patch_pull_backoff,
    patch_supernode_sleep,
)
from flwr_distill.node.line import module_of_line
from flwr_distill.node.log_lines import escape_records
from flwr_distill.node.notes import Notes, shortened
from flwr_distill.node.pace import Pace
from flwr_distill.node.policy import OPEN, Policy
from flwr_distill.node.settings import NODE_CONFIG

_REMEDIES = {
    "No SuperNode found with the given public key": (
        "the SuperLink does not know this node's key: register it there with "
        "`flwr-distill register`"
    ),
    "All SuperNodes must be registered via the CLI": (
        "the SuperLink admits registered nodes only: give the node a key (auth-key; "
        "`flwr-distill certs node` makes one) and register it with `flwr-distill register`"
    ),
}


class _Reporter(logging.Handler):
    """Reports ``("online", node_id)``, or ``("unfit", reason)`` if a restart would not help.

    It reads both from Flower's log: Flower has no other interface for them.
    """

    def __init__(self, report: Notes) -> None:
        super().__init__()
        self._report = report
        self._online = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("SuperNode ID: "):
            self._online = True
            self._report.send("online", int(text.rpartition(" ")[2]))
        elif record.levelno >= logging.ERROR and not self._online and (reason := _why_unfit(text)):
            self._report.send("unfit", shortened(reason))


def _why_unfit(error: str) -> str:
    """Return why a SuperNode that logs this error before it is online can never work, or ''."""
    for text, remedy in _REMEDIES.items():
        if text in error:
            return remedy
    if error.startswith("Exit Code: "):
        return " ".join(error.splitlines()[1:2])
    return ""


def main() -> None:
    """Run a SuperNode.

    Arguments: the report's file descriptor, the state directory, seconds of the shortest and the
    longest pause between polls for messages, the policy as JSON, then Flower's.
    """
    report = Notes.of(int(sys.argv[1]))
    state_dir, busy, idle = Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    policy = Policy.model_validate_json(sys.argv[5], by_alias=True)
    node_config = tomllib.loads((state_dir / NODE_CONFIG).read_text(encoding="utf-8"))
    pace = Pace(busy=busy, idle=idle, generator=random.Random())
    escape_records(logging.getLogger("flwr"))
    logging.getLogger("flwr").addHandler(_Reporter(report))
    patch_supernode_sleep(pace)
    patch_pull_backoff()
    patch_intake()
    patch_nonce_cleanup()
    kept = module_of_line("overrides").override(pace, policy, state_dir, node_config)
    if not kept and policy != OPEN:
        report.send("unfit", "the policy cannot be kept with this version of flwr")
        return
    sys.argv = ["flower-supernode", *sys.argv[6:]]
    try:
        flower_supernode()
    except KeyboardInterrupt:
        pass  # Flower interrupts itself when the SuperLink no longer admits it
    except Exception:
        traceback.print_exc()
    os._exit(1)  # sys.exit would wait for threads that Flower leaves running


if __name__ == "__main__":
    main()
