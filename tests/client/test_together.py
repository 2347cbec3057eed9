"""Virtual nodes of a simulation train together, and get what each would make alone."""

import copy
from dataclasses import replace
from logging import INFO

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from flwr_distill.client import simulation
from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.client.simulation import trains_together
from flwr_distill.client.training import train_round
from flwr_distill.client.training_together import train_together, why_one_by_one
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.task.datasets import Samples
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.distill.builders import seeded as generator

SIZES = [13, 40, 1, 24]
NUM_NODES = 6


@pytest.fixture(scope="module")
def sets():
    return [
        Samples(
            torch.randn(n, 1, 4, 4, generator=generator(n)),
            torch.randint(3, (n,), generator=generator(n + 1)),
        )
        for n in SIZES
    ]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )


def generators():
    return [generator(100 + node) for node in range(len(SIZES))]


def check_equal(model, sets, settings, tolerance, changes=()):
    start = copy.deepcopy(model.state_dict())
    found = train_together(model, sets, settings, generators(), changes)
    for samples, own, (weights, measures) in zip(sets, generators(), found, strict=True):
        alone = copy.deepcopy(model)
        expected = train_round(alone, samples, settings, own, changes=changes)
        assert measures.steps == expected.steps
        assert measures.loss == pytest.approx(expected.loss, rel=max(1e-5, tolerance))
        assert measures.accuracy == pytest.approx(expected.accuracy, abs=1e-6)
        for name, weight in alone.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=tolerance)
            assert not torch.equal(weights[name], start[name])
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, start[name])


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-6),
        ({"momentum": 0.9, "weight_decay": 0.1, "lr": 0.02}, 1e-6),
        ({"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.01}, 2e-5),
        ({"drop_last": True}, 1e-6),
        ({"precision": "bf16"}, 1e-2),
    ],
)
def test_nodes_of_unequal_size_get_what_each_would_make_alone(model, sets, settings, tolerance):
    check_equal(model, sets, TrainSettings(batch_size=8, local_epochs=2, **settings), tolerance)


def test_nodes_get_the_random_changes_that_each_would_make_alone(model, sets):
    settings = TrainSettings(batch_size=8, local_epochs=2, momentum=0.9)
    check_equal(model, sets, settings, 1e-6, changes=CHANGES)


def test_soft_labels_are_learned_together_too(model, sets):
    soft = [Samples(s.inputs, torch.softmax(s.inputs.flatten(1)[:, :3], 1)) for s in sets]
    check_equal(model, soft, TrainSettings(batch_size=8), 1e-6)


def test_a_node_that_diverges_leaves_the_others_alone(model, sets):
    broken = Samples(torch.full_like(sets[0].inputs, torch.nan), sets[0].labels)
    found = train_together(model, [broken, *sets[1:]], TrainSettings(batch_size=8), generators())
    finite = [all(w.isfinite().all() for w in weights.values()) for weights, _ in found]
    assert finite == [False, True, True, True]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs.flatten(1)))


class Choosing(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.flatten(1)) * (2 if inputs.mean() > 0 else 1)


@pytest.mark.parametrize(
    ("layers", "settings", "reason"),
    [
        ([nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)], {}, "more than weights to train"),
        ([Tied()], {}, "more than weights to train"),
        ([nn.Flatten(), nn.Linear(16, 3).requires_grad_(False)], {}, "more than weights"),
        ([nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)], {}, "vmap refuses the model"),
        ([Choosing(16, 3)], {}, "vmap refuses the model"),
        ([nn.Flatten(), nn.Linear(16, 3)], {"dp_noise": 1.0}, "differential privacy"),
        ([nn.Flatten(), nn.Linear(16, 3)], {}, ""),
    ],
)
def test_what_cannot_be_trained_together_is_known_before(sets, layers, settings, reason):
    found = why_one_by_one(nn.Sequential(*layers), sets[0], TrainSettings(**settings))
    assert reason in found
    assert bool(reason) == bool(found)


# Messages to virtual nodes


@pytest.fixture
def context_of(tmp_path):
    def make(partition, folder="alone", run_config=None, **node_config):
        node = {
            "partition-id": partition, "num-partitions": NUM_NODES, "device": "cpu",
            "state-dir": str(tmp_path / folder), **node_config,
        }  # fmt: skip
        run = {"train.local-epochs": 1, "simulation.together": "on", **(run_config or {})}
        return Context(1, 2**63 + partition, node, RecordDict(), run)

    return make


@pytest.fixture
def virtual(context_of):
    """Context of a virtual node."""
    return lambda partition, **run_config: context_of(
        partition, "together", run_config, simulated=True
    )


@pytest.fixture
def start(context_of):
    return create_model("auto", Session.of(context_of(0)).data.spec, seed=0)


@pytest.fixture
def calls(monkeypatch):
    """Numbers of nodes that were trained at once."""
    made = []
    original = simulation.train_together
    monkeypatch.setattr(
        simulation,
        "train_together",
        lambda model, sets, *rest: made.append(len(sets)) or original(model, sets, *rest),
    )
    return made


def asked(context, model, server_round=1, partitions=range(NUM_NODES), batch=1, **config):
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "config": ConfigRecord({"server-round": server_round, **config}),
            "together": ConfigRecord({"partitions": list(partitions), "batch": batch}),
        }
    )
    message = Message(content, context.node_id, "train")
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, context).content


def check_same(found, expected):
    assert found["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        assert type(found["metrics"][key]) is type(value)
        assert found["metrics"][key] == pytest.approx(value, rel=1e-5)
    assert list(found["arrays"]) == list(expected["arrays"])
    for name, array in expected["arrays"].items():
        torch.testing.assert_close(
            *(torch.from_numpy(a.numpy()) for a in (found["arrays"][name], array)),
            rtol=0,
            atol=1e-6,
        )


def test_the_first_message_trains_all_virtual_nodes_that_get_it(context_of, virtual, start, calls):
    for partition in range(NUM_NODES):
        check_same(asked(virtual(partition), start), asked(context_of(partition), start))
    assert calls == [NUM_NODES]


def test_the_setting_changes_images_of_all_in_the_same_way(context_of, virtual, start, calls):
    setting = {"train.augment": "auto"}
    for partition in (0, 3):
        alone = asked(context_of(partition, run_config=setting), start)
        check_same(asked(virtual(partition, **setting), start), alone)
        plain = asked(context_of(partition, "plain"), start)
        assert plain["metrics"]["train-loss"] != alone["metrics"]["train-loss"]
    assert calls == [NUM_NODES]


def test_many_nodes_are_trained_some_at_a_time(virtual, start, calls, monkeypatch):
    monkeypatch.setattr(simulation, "MAX_BATCH", 2)
    for partition in (4, 0, 5, 2, 3):
        asked(virtual(partition), start, partitions=[0, 2, 3, 4, 5])
    assert calls == [2, 2, 1]


def test_nodes_of_each_of_two_devices_train_in_a_batch_of_their_own(context_of, start, calls):
    for partition in range(NUM_NODES):
        node = context_of(partition, "two", simulated=2)
        check_same(asked(node, start), asked(context_of(partition), start))
    assert calls == [NUM_NODES // 2] * 2


def test_a_result_is_only_taken_for_the_message_that_it_was_made_for(virtual, start, calls):
    other = copy.deepcopy(start)
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    asked(virtual(0), start)
    for batch, model, changed in (
        *((2, other, {}), (3, start, {"lr": 0.5}), (4, start, {"server_round": 2})),
    ):
        asked(virtual(1), model, batch=batch, **changed)
    asked(virtual(1), start, partitions=[0, 1], batch=5)
    assert calls == [NUM_NODES] * 4 + [2]


def test_results_are_dropped_when_used_or_when_a_later_round_begins(virtual, start, tmp_path):
    def kept():
        files = (tmp_path / "together").glob("runs/1/together-*/*")
        return sorted(file.name for file in files if file.name[0].isdigit())

    asked(virtual(0), start)
    assert kept() == ["1", "2", "3", "4", "5"]
    asked(virtual(3), start)
    assert kept() == ["1", "2", "4", "5"]
    asked(virtual(3), start, server_round=2, partitions=[3, 4])
    assert kept() == ["4"]
    asked(virtual(0), start, partitions=[0, 1], batch=2)  # a late message of the round before
    assert kept() == ["1", "4"]


def test_a_node_that_is_asked_again_trains_alone(context_of, virtual, start, calls):
    asked(virtual(0), start)
    asked(virtual(0), start)
    check_same(asked(virtual(0), start), asked(context_of(0), start))
    assert calls == [NUM_NODES]


def test_what_cannot_train_together_trains_one_by_one_and_the_log_says_so_once(
    virtual, start, calls, monkeypatch
):
    said = []
    monkeypatch.setattr(simulation, "log", lambda level, text, *rest: said.append((level, rest)))
    simulation._log_once.cache_clear()
    for partition in (0, 1, 2):
        for server_round in (1, 2):
            context = virtual(partition, **{"train.proximal-mu": 0.1})
            assert asked(context, start, server_round=server_round)["metrics"]["num-steps"] > 0
    assert calls == []
    assert [level for level, _ in said] == [INFO]
    assert "adds terms to the loss" in said[0][1][0]


def test_without_memory_for_all_at_once_they_train_one_by_one(
    context_of, virtual, start, monkeypatch
):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(simulation, "train_together", full)
    check_same(asked(virtual(0), start), asked(context_of(0), start))


def test_a_node_of_a_deployment_trains_by_itself_whatever_a_server_sends(context_of, start, calls):
    asked(context_of(0), start)
    message = Message(RecordDict(), 1, DESCRIBE)
    message.metadata.__dict__["_message_id"] = "1"
    assert "together" not in app(message, context_of(0)).content["metrics"]
    assert calls == []


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("auto", "cpu", False), ("auto", "cuda:1", True), ("on", "cpu", True),
        ("off", "cuda:1", False),
    ],
)  # fmt: skip
def test_auto_is_on_where_the_node_computes_on_a_gpu(virtual, setting, device, expected):
    context = virtual(0, **{"simulation.together": setting})
    session = replace(Session.of(context), device=torch.device(device))
    assert trains_together(context, session) is expected
