"""Two of five real nodes send NaN and far too long updates; the others' model is learned."""

import math

import pytest

from flwr_distill.fleet.local_federation import LocalFederation

from .runs import ROOT, complete, journal, read, rows

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
    ours, theirs = 'clientapp = "flwr_distill.client_app:app"', 'clientapp = "hostile.client:app"'
    assert ours in pyproject
    for name, text in {
        "pyproject.toml": pyproject.replace(ours, theirs),
        "README.md": "A test's app.",
        "LICENSE": "Apache-2.0",
        "hostile/__init__.py": "",
        "hostile/client.py": CLIENT,
    }.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    return tmp_path / "app"


def test_two_hostile_nodes_are_rejected_in_each_round_and_the_model_learns(hostile_app, tmp_path):
    settings = {"strategy": "fedavg", "partition.scheme": "iid", "num-rounds": 3}
    settings["phase-timeout"] = 600.0  # five new workers start slowly on a busy machine
    with LocalFederation(NODES, tmp_path / "state") as federation:
        folder = complete(federation, tmp_path, settings, hostile_app)
    assert [row["set_aside"] for row in rows(folder)] == [0, 2, 2, 2]
    first, *_, last = rows(folder)
    assert math.isfinite(last["loss"])
    assert last["accuracy"] > 0.5 > first["accuracy"]
    nodes = read(folder, "about")["nodes"]
    rejected = {
        (entry["round"], nodes[entry["set_aside"]]["name"], entry["reason"].split()[-1])
        for entry in journal(folder)
        if "set_aside" in entry
    }
    assert rejected == {
        (r, f"node-{place}", why)
        for r in (1, 2, 3)
        for place, why in ((1, "infinity"), (3, "norm-threshold"))
    }
