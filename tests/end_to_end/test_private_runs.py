"""Whole runs with differential privacy, of our ServerApp with our ClientApp in this process."""

import json
import sys
import types

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flwr_distill.client import app as ours
from flwr_distill.server.page.privacy import spent
from flwr_distill.server.page.run_files import read_run
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model
from tests.matrix import strategies

from .runs import rows

PRIVATE_HFLDD = {
    "train.dp-noise": 2.0,
    "hfldd.dp-epsilon": 10.0,
    "hfldd.start": "noise",
    "hfldd.balanced": False,
    "hfldd.auxiliary-size": 20,
    "hfldd.distill-steps": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", strategies(["fedavg", "fedprox", "scaffold", "feddyn", "moon"])
)
def test_every_node_reports_its_epsilon_and_the_model_moves(run, strategy):
    """Some keep state on nodes, and all of them read replies without a loss."""
    noise = {"train.dp-noise": 2.0, "train.proximal-mu": 0.1}
    finished = read_run(run(strategy=strategy, **noise))
    assert len(spent(finished)) == 4
    assert len({row["loss"] for row in finished.rows}) == 3
    assert not [entry for entry in finished.journal if "warning" in entry]


@pytest.mark.slow
def test_hfldd_is_private_from_label_knowledge_to_heads(run):
    finished = read_run(run(strategy="hfldd", **PRIVATE_HFLDD))
    epsilons = spent(finished)
    heads = {head for heads in finished.topology["heads"].values() for head in heads}
    assert set(epsilons) == set(finished.names.values())
    for node in set(epsilons) - heads:  # label knowledge and virtual data, one after the other
        assert epsilons[node] > 10
    replies = [numbers for entry in finished.journal for numbers in entry.get("nodes", {}).values()]
    assert not any("highest-cosine" in numbers or "train-loss" in numbers for numbers in replies)
    assert len({row["loss"] for row in finished.rows}) == 3


@pytest.mark.slow
def test_fedlgd_spends_its_epsilon_once_and_all_else_follows_from_that_release(run):
    steps = {f"fedlgd.{name}-steps": 3 for name in ("first", "global")}
    private = {"fedlgd.dp-epsilon": 2.0, "fedlgd.refine-steps": 0, "fedlgd.every": 2}
    finished = read_run(run(strategy="fedlgd", **steps, **private, num_rounds=3))
    assert len(spent(finished)) == 4
    epsilons = [
        numbers["dp-epsilon"]
        for entry in finished.journal
        for numbers in entry.get("nodes", {}).values()
        if "dp-epsilon" in numbers
    ]
    assert len(epsilons) == 3 * 4
    assert max(epsilons) - min(epsilons) < 1e-9
    assert 1.9 < max(epsilons) <= 2.0
    assert len({row["loss"] for row in finished.rows}) == 4


@pytest.mark.slow
def test_the_run_goes_on_without_nodes_whose_budget_is_spent(run):
    """One round is within it, two are not."""
    budget = {"train.dp-noise": 2.0, "train.dp-epsilon": 0.75, "partition.classes": 2}
    finished = read_run(run(strategy="fedavg", **budget))
    assert max(spent(finished).values()) <= 0.75
    trained = [entry for entry in finished.journal if entry.get("phase") == "train"]
    assert [len(entry["nodes"]) for entry in trained] == [4, 0]


def update_of(mod, **config):
    """Norm of what a node's model moves by, with one of Flower's mods on our train handler."""
    app = ClientApp()
    app.train(mods=[mod])(ours.train)
    start = ArrayRecord(create_model("auto", load_dataset("digits").spec, seed=0).state_dict())
    content = RecordDict({"arrays": start, "config": ConfigRecord(config)})
    message = Message(content, 5, "train")
    message.metadata.__dict__["_message_id"] = "1"
    node = {"partition-id": 0, "num-partitions": 20, "device": "cpu"}
    reply = app(message, Context(1, 5, node, RecordDict(), {})).content
    trained = reply["arrays"]
    moved = [trained[name].numpy() - start[name].numpy() for name in start]
    return float(np.sqrt(sum(np.square(part).sum() for part in moved)))


def test_flowers_client_side_mods_clip_and_noise_what_our_client_sends():
    free = update_of(lambda message, context, call_next: call_next(message, context))
    assert free > 0.1
    clipped = update_of(fixedclipping_mod, clipping_norm=0.1)
    assert clipped == pytest.approx(0.1, rel=1e-3)
    noisy = update_of(LocalDpMod(0.1, sensitivity=0.1, epsilon=1.0, delta=1e-5))
    assert noisy > free


def test_flowers_wrappers_run_in_a_class_without_a_strategy_to_be_given(run, monkeypatch):
    class PrivateFedAvg(DifferentialPrivacyServerSideFixedClipping):
        def __init__(self, noise: float) -> None:
            inner = FedAvg(fraction_evaluate=0.0)
            super().__init__(inner, noise, clipping_norm=0.5, num_sampled_clients=4)

    module = types.ModuleType("private_fedavg")
    module.PrivateFedAvg = PrivateFedAvg
    monkeypatch.setitem(sys.modules, "private_fedavg", module)
    arguments = {"strategy-args": json.dumps({"noise": 0.1})}
    folder = run(strategy="private_fedavg:PrivateFedAvg", **arguments)
    assert len({row["loss"] for row in rows(folder)}) == 3
