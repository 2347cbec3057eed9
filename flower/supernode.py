"""Flower's SuperNode with our timing; reports its state to the supervisor."""

from __future__ import annotations

import os
import random
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.supercore.exit import add_exit_handler
from flwr.supernode.cli import flower_supernode

from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.overrides import (
    Reports,
    WholeMessages,
    patch_bundle_reading,
    patch_loop,
    patch_nonce_cleanup,
    patch_reports,
    patch_supernode_sleep,
)
from flwr_distill.flower.pulls import patch_pull_backoff
from flwr_distill.flower.steps import LimitedLink, LogIds, Progress, RunEnds, Spacing, StoppedRuns
from flwr_distill.node import log_lines
from flwr_distill.node.bell import Bell
from flwr_distill.node.link import Link, QuietHours
from flwr_distill.node.notes import Notes
from flwr_distill.node.pace import Pace

_NO_LIMITS = (
    f"max-rate and quiet-hours cannot be kept with flwr {version('flwr')}: drop them, or install "
    "flwr==1.32.1"
)


def _key_file(arguments: list[str]) -> str:
    """The file of the node's key, in Flower's arguments; '' without one."""
    option = "--auth-supernode-private-key"
    return arguments[arguments.index(option) + 1] if option in arguments else ""


def main() -> None:
    """Run a SuperNode.

    Arguments: the file descriptors of the report and of the executor's bell, the state directory,
    the shortest and the longest pause between polls in seconds, the link's rate and quiet hours or
    '' for none, then Flower's.
    """
    report, bell = Notes.of(int(sys.argv[1])), Bell(int(sys.argv[2]))
    state_dir, busy, idle = Path(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    pace = Pace(busy=busy, idle=idle, generator=random.Random())
    log_lines.begin("supernode")
    reports = Reports(report, _key_file(sys.argv))
    patch_reports(reports)
    patch_supernode_sleep(pace)
    patch_pull_backoff()
    patch_nonce_cleanup()
    patch_bundle_reading()
    steps = [WholeMessages(bell.ring), Spacing(pace), RunEnds(state_dir), StoppedRuns(), LogIds()]
    steps.append(Progress(reports.moves))
    rate, hours = sys.argv[6:8]
    if rate or hours:
        quiet_hours = QuietHours.parse(hours) if hours else None
        link = Link(float(rate) if rate else None, quiet_hours, reports.quiet)
        add_exit_handler(link.end)
        steps.append(LimitedLink(link))
    if not patch_loop(*steps) and (rate or hours):
        reports.unfit(_NO_LIMITS)
        os._exit(1)
    overrides: Any = module_of_line("node", "overrides")
    if overrides is not None:
        overrides.override(pace, reports.refused)
    sys.argv = ["flower-supernode", *sys.argv[8:]]
    try:
        flower_supernode()
    except KeyboardInterrupt:
        pass  # Flower interrupts itself when the SuperLink no longer admits it
    except Exception:
        traceback.print_exc()
    os._exit(1)  # sys.exit would wait for threads that Flower leaves running


if __name__ == "__main__":
    main()
