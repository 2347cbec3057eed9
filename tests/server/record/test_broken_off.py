"""A node that dies while it sends a large model, with real processes."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation

APP = Path(__file__).resolve().parents[3] / "benchmarks" / "rounds_app"
MEGABYTES = 400.0
NODES = """
    if context.node_config["partition-id"]:
        arrays = ArrayRecord({"0": arrays["0"]})
    else:  # not what the SuperLink has already
        arrays = ArrayRecord([array.numpy() * 2 for array in arrays.values()])
"""
SERVER = """
from pathlib import Path
from flwr_distill.flower.line_1_32.server.inbox import SuperLinkInbox

def telling(pull):
    def pull_and_tell(self, tree, most):
        answer = pull(self, tree, most)
        if answer is None and len(tree.children[0].children[0].children) > 99:
            Path(COMING).touch()
        return answer
    return pull_and_tell

SuperLinkInbox._pull = telling(SuperLinkInbox._pull)
"""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def app(tmp_path):
    """Node 0 sends much; the server touches the file `coming` when a part of it is there."""
    app = shutil.copytree(APP, tmp_path / "app") / "rounds_app"
    nodes = (app / "client.py").read_text()
    same = '    metrics = MetricRecord({"num-examples": 1})\n'
    assert same in nodes
    (app / "client.py").write_text(nodes.replace(same, same + NODES))
    with (app / "server.py").open("a") as server:
        server.write(f"COMING = {str(tmp_path / 'coming')!r}\n{SERVER}")
    return app.parent


def test_a_node_that_dies_while_it_sends_costs_its_reply_alone(tmp_path, app):
    def on_line(line):
        if "configure_train" not in line:
            return
        while not (tmp_path / "coming").exists():
            time.sleep(0.01)
        told = json.loads((federation.nodes[0].state_dir / "node.json").read_text())
        for part in ("pid", "supernode", "executor", "worker"):
            with suppress(ProcessLookupError):  # ended with the one before
                os.kill(told[part], signal.SIGKILL)

    settings = {"work": "trivial", "megabytes": MEGABYTES, "phases": 1, "nodes": 2, "fast": True}
    with LocalFederation(2, tmp_path / "state") as federation:
        outcome = federation.run(app, settings, on_line=on_line, timeout=240)
    lines = "\n".join(outcome.lines)
    assert outcome.completed, lines
    assert "The node was lost while it sent its reply" in lines
    (phase,) = re.findall(r"PHASE ([\d.]+) (\d+) (\d+)", lines)
    assert phase[1:] == ("2", "1")
    assert float(phase[0]) < 200  # about 90 s until a SuperLink takes a node for lost
