"""FedHEAD over direct links: a leader is killed before it hands out the model."""

import json
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation

ROOT = Path(__file__).resolve().parents[2]
NODES, SECTORS, ROUNDS = 6, 2, 3

pytestmark = [pytest.mark.faults, pytest.mark.all_faults, pytest.mark.timeout(400)]

KILLING = '''
"""FedHEAD whose first leader of round 1 is killed, with all its processes, after distillation."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from flwr_distill.strategies.fedhead.method import DISTILL_SECTOR
from flwr_distill.strategies.fedhead.strategy import FedHEAD

class KillingGrid:
    def __init__(self, grid, nodes):
        self._grid, self._nodes = grid, nodes

    def __getattr__(self, name):
        return getattr(self._grid, name)

    def send_and_receive(self, messages, **settings):
        messages = list(messages)
        replies = self._grid.send_and_receive(messages, **settings)
        if messages and messages[0].metadata.message_type == DISTILL_SECTOR:
            self._kill(messages[0].metadata.dst_node_id)
        return replies

    def _kill(self, victim):
        for file in Path(self._nodes).glob("node-*/node.json"):
            status = json.loads(file.read_text())
            if status.get("online") == victim:
                for part in ("pid", "supernode", "executor", "worker", "mailbox"):
                    with suppress(ProcessLookupError):  # ended with the one before
                        os.kill(status[part], signal.SIGKILL)
                print("KILLED", file.parent.name, flush=True)

class Killing(FedHEAD):
    def __init__(self, *, nodes, **settings):
        super().__init__(**settings)
        self._nodes = nodes

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 1:
            grid = KillingGrid(grid, self._nodes)
        return super().configure_train(server_round, arrays, config, grid)
'''


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Six nodes with direct links, and a strategy that kills."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "site").mkdir()
    (folder / "site" / "killing.py").write_text(KILLING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "site"))
        with LocalFederation(NODES, folder / "state", direct_links=True) as running:
            yield running


def test_a_leader_that_cannot_hand_out_is_replaced_and_leads_no_more(federation, tmp_path):
    settings = {
        "strategy": "killing:Killing",
        "strategy-args": json.dumps({"nodes": str(federation.state_dir)}),
        "links": "direct",
        "num-rounds": ROUNDS,
        "min-nodes": NODES,
        "train.local-epochs": 1,
        "fedhead.sectors": SECTORS,
        "fedhead.fixed-leader": True,  # who is killed would lead again
        "fedhead.distill-epochs": 1,
        "fedhead.least-classes": 0.0,  # all leaders distil
        "phase-timeout": 120.0,
        "runs-dir": str(tmp_path),
    }
    outcome = federation.run(ROOT, settings, timeout=300)
    assert outcome.completed, "\n".join(outcome.lines[-40:])
    (killed,) = [line.split()[1] for line in outcome.lines if line.startswith("KILLED")]
    assert sum("failed in train.hand_out" in line for line in outcome.lines) == 1
    folder = tmp_path / str(outcome.run_id)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
    assert rows[1]["loss"] != rows[0]["loss"]  # the round's model is a new one
    heads = json.loads((folder / "topology.json").read_text())["heads"]
    (other,) = set(heads["1"]) - {killed}
    for later in ("2", "3"):
        (successor,) = set(heads[later]) - {other}
        assert successor != killed
