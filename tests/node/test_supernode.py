"""A SuperNode that fails ends at once, so that its supervisor starts it anew."""

import logging
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from flwr_distill.flower import overrides as timing
from flwr_distill.flower import supernode
from flwr_distill.node.notes import Notes
from flwr_distill.node.policy import HOSPITAL
from tests.node.test_node_reports import EXITING

FAILS = """
import threading, time
from flwr_distill.flower import supernode

def refused():
    threading.Thread(target=time.sleep, args=(600,)).start()  # as Flower leaves them
    raise {error}

supernode.flower_supernode = refused
supernode.main()
"""


@pytest.mark.parametrize(
    ("error", "shown"),
    [("RuntimeError('refused')", "RuntimeError: refused"), ("KeyboardInterrupt", "")],
)
def test_it_waits_for_no_thread_that_flower_left_behind(
    error: str, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "node-config.toml").touch()
    reports, report = Notes.pair()
    with reports, report:
        ended = subprocess.run(
            [
                *(sys.executable, "-c", FAILS.format(error=error)),
                *(str(report.fileno()), str(tmp_path), "0.05", "20", "{}"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=[report.fileno()],
        )
    assert ended.returncode == 1
    assert (ended.stderr.splitlines() or [""])[-1] == shown


def test_a_policy_that_another_version_of_flower_cannot_keep_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node-config.toml").touch()
    reports, report = Notes.pair()
    policy = HOSPITAL.model_dump_json(by_alias=True)
    numbers = [str(os.dup(report.fileno())), str(tmp_path), "0.05", "20"]
    monkeypatch.setattr(sys, "argv", ["flwr_distill.flower.supernode", *numbers, policy])
    monkeypatch.setattr(timing, "FLOWER_VERSIONS", ("1.0.0",))
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
    # Restored afterwards: a SuperNode's process never undoes what it patches.
    monkeypatch.setattr(InMemoryNodeState, "set_node_id", InMemoryNodeState.set_node_id)
    for name in EXITING:
        module = import_module(name)
        monkeypatch.setattr(module, "flwr_exit", module.flwr_exit)
    supernode.main()
    assert "the policy cannot be enforced" in reports.receive(60)[1]
    reports.close()
    report.close()
