"""Two of five real nodes send NaN and far too long updates; the others' model is learned."""

import json
import math
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation

ROOT = Path(__file__).resolve().parents[2]
NODES = 5

pytestmark = pytest.mark.slow

CLIENT = '''
"""Our ClientApp, but nodes 1 and 3 spoil what they have trained."""

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp

from flwr_distill.client.app import app as ours

FACTORS = {1: np.nan, 3: 1000.0}


class Hostile(ClientApp):
    def __call__(self, message, context):
        reply = ours(message, context)
        factor = FACTORS.get(context.node_config["partition-id"])
        if factor is not None and message.metadata.message_type == "train":
            for name, array in reply.content["arrays"].items():
                start = message.content["arrays"][name].numpy()
                spoiled = start + factor * (array.numpy() - start)
                reply.content["arrays"][name] = Array(spoiled.astype(start.dtype))
        return reply


app = Hostile()
'''


@pytest.fixture
def hostile_app(tmp_path):
    """Directory of an app that is ours, but for its ClientApp."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    ours, theirs = 'clientapp = "flwr_distill.client.app:app"', 'clientapp = "hostile.client:app"'
    assert ours in pyproject
    (tmp_path / "app" / "hostile").mkdir(parents=True)
    (tmp_path / "app" / "pyproject.toml").write_text(pyproject.replace(ours, theirs))
    (tmp_path / "app" / "README.md").write_text("A test's app.")
    (tmp_path / "app" / "LICENSE").write_text("Apache-2.0")
    (tmp_path / "app" / "hostile" / "__init__.py").write_text("")
    (tmp_path / "app" / "hostile" / "client.py").write_text(CLIENT)
    return tmp_path / "app"


def test_two_hostile_nodes_are_set_aside_in_each_round_and_the_model_learns(hostile_app, tmp_path):
    settings = {
        "strategy": "fedavg",
        "partition.scheme": "iid",
        "num-rounds": 3,
        "min-nodes": NODES,
        "runs-dir": str(tmp_path),
    }
    with LocalFederation(NODES, tmp_path / "state") as federation:
        outcome = federation.run(hostile_app, settings, timeout=240)
    assert outcome.completed, "\n".join(outcome.lines[-40:])
    folder = tmp_path / str(outcome.run_id)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["set_aside"] for row in rows] == [0, 2, 2, 2]
    assert math.isfinite(rows[-1]["loss"])
    assert rows[-1]["accuracy"] > 0.5 > rows[0]["accuracy"]
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    nodes = json.loads((folder / "about.json").read_text())["nodes"]
    told = {
        (entry["round"], nodes[entry["set_aside"]]["name"], entry["reason"].split()[-1])
        for entry in entries
        if "set_aside" in entry
    }
    assert told == {
        (r, f"node-{place}", why)
        for r in (1, 2, 3)
        for place, why in ((1, "infinity"), (3, "norm-threshold"))
    }
