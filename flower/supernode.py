"""Flower's SuperNode with our timing; reports its state to the supervisor."""

from __future__ import annotations

import logging
import os
import random
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any

from flwr.supernode.cli import flower_supernode

from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.overrides import (
    Reports,
    patch_nonce_cleanup,
    patch_pull_backoff,
    patch_reports,
    patch_supernode_sleep,
)
from flwr_distill.node.log_lines import escape_records
from flwr_distill.node.notes import Notes
from flwr_distill.node.pace import Pace
from flwr_distill.node.policy import OPEN, Policy
from flwr_distill.node.settings import NODE_CONFIG


def main() -> None:
    """Run a SuperNode.

    Arguments: the report's file descriptor, the state directory, the shortest and the longest pause
    between polls in seconds, the policy as JSON, then Flower's.
    """
    report = Notes.of(int(sys.argv[1]))
    state_dir, busy, idle = Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    policy = Policy.model_validate_json(sys.argv[5], by_alias=True)
    node_config = tomllib.loads((state_dir / NODE_CONFIG).read_text(encoding="utf-8"))
    pace = Pace(busy=busy, idle=idle, generator=random.Random())
    escape_records(logging.getLogger("flwr"))
    reports = Reports(report)
    patch_reports(reports)
    patch_supernode_sleep(pace)
    patch_pull_backoff()
    patch_nonce_cleanup()
    overrides: Any = module_of_line("node", "overrides")
    is_enforced = overrides.override(pace, policy, state_dir, node_config, reports.refused)
    if not is_enforced and policy != OPEN:
        report.send("unfit", "the policy cannot be enforced with this version of flwr")
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
