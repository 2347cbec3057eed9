"""Virtual nodes of a simulation distil together, and get what each would make alone."""

import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_distill.client.dp_sgd import PrivacyAccount
from flwr_distill.client.session import Session
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.kip import DESCENT, Descent
from flwr_distill.distill.many import distill_many
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.messages import SIMULATED
from flwr_distill.strategies.hfldd import distillation
from flwr_distill.strategies.hfldd.distillation import distilled
from flwr_distill.strategies.hfldd.requests import Distillation
from tests.errors import at

NUM_NODES = 12
RUN_CONFIG = {"partition.scheme": "pathological", "partition.classes": 1}


@pytest.fixture
def context_of(tmp_path):
    def make(partition, folder="alone"):
        node_config = {
            "partition-id": partition,
            "num-partitions": NUM_NODES,
            "state-dir": str(tmp_path / folder),
            "device": "cpu",
        }
        return Context(1, 2**63 + partition, node_config, RecordDict(), RUN_CONFIG)

    return make


@pytest.mark.parametrize("name", ["kip-negatives", "auto"])
def test_a_batch_of_virtual_nodes_gets_what_each_would_make_alone(name, context_of, monkeypatch):
    request = Distillation(distiller=name, distilled_size=4, distill_steps=3, bits=8)
    alone = {i: distilled(context_of(i), request).payload for i in range(3)}
    monkeypatch.setattr(distillation, "_in_batches", lambda *context: True)
    for i, expected in alone.items():
        payload = distilled(context_of(i, "together"), request).payload
        found, expected = map(VirtualData.from_bytes, (payload, expected))
        assert found.method == expected.method
        assert torch.equal(found.labels, expected.labels)
        scale = float(expected.images.max() - expected.images.min()) / 255
        torch.testing.assert_close(found.images, expected.images, rtol=0, atol=scale)
        assert found.card is not None


@pytest.mark.parametrize("simulation", [False, True])
def test_pixels_have_the_bits_that_were_asked_for(simulation, context_of, monkeypatch):
    monkeypatch.setattr(distillation, "_in_batches", lambda *context: simulation)
    request = Distillation(distiller="kip", distilled_size=4, distill_steps=1, bits=2)
    made = VirtualData.from_bytes(distilled(context_of(0), request).payload)
    assert 2 < len(made.images.unique()) <= 4


def test_kip_descends_as_the_request_says(context_of, monkeypatch):
    given = []

    def spied(*arguments, descent, **options):
        given.append(descent)
        return distill_many(*arguments, descent=descent, **options)

    monkeypatch.setattr(distillation, "distill_many", spied)
    how = {"kip_lr": 0.004, "kip_batch_size": 10, "kip_lambda": 1e-5, "kip_relative": False}
    for changed in ({}, how):
        request = Distillation(distiller="kip", distilled_size=4, distill_steps=1, **changed)
        distilled(context_of(0), request)
    assert given == [DESCENT, Descent(0.004, 10, 1e-5, relative=False)]


@pytest.fixture
def sizes(monkeypatch):
    """Numbers of nodes for which a call distilled."""
    made = []
    original = distillation.distill_many
    monkeypatch.setattr(
        distillation,
        "distill_many",
        lambda name, sets, **rest: made.append(len(sets)) or original(name, sets, **rest),
    )
    return made


LITTLE = Distillation(distiller="kip-negatives", distilled_size=2, distill_steps=1)


def test_a_batch_is_distilled_once(context_of, sizes, monkeypatch):
    monkeypatch.setattr(distillation, "_in_batches", lambda *context: True)
    for partition in (0, 2, 4, 1, 3, 2):
        distilled(context_of(partition), LITTLE)
    assert sizes == [6, 6]  # 12 nodes in two batches


def test_on_a_cpu_each_virtual_node_distils_for_itself_and_workers_wait_for_none(context_of, sizes):
    for partition in (0, 1):
        context = context_of(partition)
        context.node_config[SIMULATED] = 1
        distilled(context, LITTLE)
    assert sizes == [1, 1]


@pytest.mark.parametrize(
    ("name", "warned"), [("kip", True), ("kip-negatives", True), ("dm", False)]
)
def test_a_node_warns_of_what_attacks_find_in_its_virtual_data(
    name, warned, context_of, flower_log
):
    distilled(context_of(0), Distillation(distiller=name, distilled_size=4, distill_steps=1))
    assert ("records that are unlike the others" in flower_log.text) == warned


def test_what_cannot_be_distilled_privately_costs_no_epsilon(tmp_path):
    """Rows of a table have no pixels for the networks, and each message would book once more."""
    rows = [f"{age},{label}" for age in range(20) for label in ("no", "yes")]
    (tmp_path / "table.csv").write_text("\n".join(["age,label", *rows]) + "\n")
    config = {"dataset": "private", "private.classes": "no,yes", "private.columns": "age:10+-5"}
    node = {"data": str(tmp_path / "table.csv"), "state-dir": str(tmp_path), "device": "cpu"}
    context = Context(1, 5, node, RecordDict(), config)
    request = Distillation(start="noise", distilled_size=2, distill_steps=1, dp_epsilon=2.0)
    with pytest.raises(DistillError, check=at("dp-epsilon", value=2.0)):
        distilled(context, request)
    session = Session.of(context)
    assert PrivacyAccount.of(session, session.task.train).epsilon == 0
