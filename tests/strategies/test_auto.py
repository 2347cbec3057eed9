"""Auto sees how much labels differ, takes a strategy, and leaves everything else to that."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from scipy.special import softmax

from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.method import CHOICE
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.auto import Auto, rule, strategy
from flwr_distill.strategies.auto.rule import Choice, choose
from flwr_distill.strategies.auto.skew import label_skew, one_class_labels
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.method import LABEL_KNOWLEDGE
from flwr_distill.task.datasets import auxiliary_images
from flwr_distill.task.models import create_model

from .rounds import MODEL, SPEC, spoil, start

CONFIG = {"partition.scheme": "iid", "train.local-epochs": 1}


class Noted(FedAvg):
    """FedAvg with a state and files."""

    def __init__(self):
        super().__init__(min_available_nodes=1, min_train_nodes=1)
        self.rounds = []

    def configure_train(self, server_round, arrays, config, grid):
        self.rounds.append(server_round)
        return super().configure_train(server_round, arrays, config, grid)

    def artifacts(self):
        return {"rounds.txt": b"1"}

    def state_dict(self):
        return {"rounds": list(self.rounds)}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


def make(name):
    """HFLDD, which asks for soft labels, and a stand-in for any other strategy."""
    if name != "hfldd":
        return Noted()
    return HFLDD(auxiliary_size=50, distiller="dm", distilled_size=4, distill_steps=1)


def auxiliary(name, size):
    return auxiliary_images(name, SPEC, size, 0)


@pytest.fixture
def auto():
    """An Auto on digits; `made` has the names of the strategies that it had made."""

    def create(name):
        made.append(name)
        return make(name)

    made = []
    instance = Auto(model=MODEL, num_classes=10, auxiliary=auxiliary, create=create)
    return SimpleNamespace(strategy=instance, made=made)


def asked(grid):
    """Nodes that were asked for soft labels, one entry for each message."""
    messages = [message.metadata for message in grid.pushed]
    return sorted(about.dst_node_id for about in messages if about.message_type == LABEL_KNOWLEDGE)


SKEWED = {"partition.classes": 2, "partition.scheme": "pathological"}


@pytest.mark.parametrize("part", ["head", "last-block"])
def test_the_head_of_a_frozen_network_is_taken_in_closed_form_and_nobody_is_asked(
    client_grid, part
):
    model = create_model("random-features", SPEC, seed=0)
    model.thaw(part)
    made = []
    auto = Auto(
        model=model,
        num_classes=10,
        auxiliary=auxiliary,
        create=lambda name: made.append(name) or Noted(),
    )
    grid = client_grid(2, {**CONFIG, "model": "random-features", "backbone.trains": part})
    list(auto.configure_train(1, ArrayRecord(model.state_dict()), ConfigRecord(), grid))
    assert not asked(grid)
    assert (made == ["analytic"]) == (part == "head")
    assert ("frozen network" in auto.choice.reason) == (part == "head")


def configured(auto, grid, server_round=1):
    return list(auto.configure_train(server_round, start(), ConfigRecord({"lr": 0.05}), grid))


def moved_towards(shares, far=0.3):
    """Soft labels (20, 10) of a model that a few steps moved towards classes by their shares."""
    common = np.random.default_rng(0).normal(size=(20, 10))
    return softmax(common + far * np.asarray(shares), axis=1)


def one_hot(nodes):
    return [moved_towards(np.eye(10)[node % 10]) for node in range(nodes)]


def test_the_skew_is_the_distance_of_the_nodes_shares_in_units_of_one_class_each():
    reference = one_hot(10)
    assert label_skew([moved_towards(np.full(10, 0.1))] * 5, reference) == pytest.approx(
        0, abs=1e-6
    )
    assert label_skew(one_hot(10), reference) == pytest.approx(1, abs=1e-3)
    halves = [moved_towards(np.eye(10)[2 * i] / 2 + np.eye(10)[2 * i + 1] / 2) for i in range(5)]
    assert label_skew(halves, reference) == pytest.approx(0.5**0.5, abs=1e-3)


def test_a_fifth_of_liars_does_not_move_the_skew():
    alike = [moved_towards(np.full(10, 0.1))] * 8
    for lie in (np.eye(10)[[3] * 20], np.eye(10)[[7] * 20]):
        assert label_skew([*alike, lie, lie], one_hot(10)) == pytest.approx(0, abs=1e-6)


def test_one_class_labels_need_no_data_and_leave_the_model_as_it_is():
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    samples = auxiliary_images("noise", SPEC, 100, 0)
    labels = one_class_labels(MODEL, samples, 10, steps=10, lr=0.01, batch_size=64)
    assert [each.shape for each in labels] == [(100, 10)] * 10
    own = np.stack([np.log(each).mean(0) for each in labels])
    assert (own.argmax(axis=0) == np.arange(10)).all()  # each class is likeliest where it was seen
    for name, value in MODEL.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("partition", "low", "high", "held"),
    [
        (SKEWED, 0.5, 0.9, 0.2),
        ({"partition.classes": 1, "partition.scheme": "pathological"}, 0.9, 1.3, 0.1),
    ],
    ids=["two classes", "one class"],
)
def test_the_skew_of_real_nodes_is_seen(auto, client_grid, partition, low, high, held):
    configured(auto.strategy, client_grid(10, {**CONFIG, **partition}))
    assert low <= auto.strategy.choice.skew <= high
    assert auto.strategy.choice.held == held


def test_where_nodes_hold_most_classes_nobody_is_asked_and_what_was_taken_does_the_rounds(
    auto, client_grid
):
    grid = client_grid(4, CONFIG)
    assert [m.metadata.message_type for m in configured(auto.strategy, grid)] == ["train"] * 4
    configured(auto.strategy, grid, 2)
    assert not asked(grid)
    assert auto.strategy.choice == Choice("fedfa", None, 1.0)
    assert "100% of the classes" in auto.strategy.choice.reason
    assert auto.made == ["fedfa"]
    assert auto.strategy.taken.rounds == [1, 2]
    assert auto.strategy.artifacts()["rounds.txt"] == b"1"


def test_hfldd_forms_its_clusters_by_the_labels_that_auto_asked_for(auto, client_grid, monkeypatch):
    monkeypatch.setattr(strategy, "MAX_ASKED", 3)
    grid = client_grid(4, {**CONFIG, **SKEWED})
    configured(auto.strategy, grid)
    assert auto.made == [auto.strategy.choice.strategy] == ["hfldd"]
    assert asked(grid) == sorted(grid.nodes)
    assert not auto.strategy.taken.labels


def test_a_resumed_run_goes_on_with_what_was_taken_and_asks_nobody(auto, client_grid):
    grid = client_grid(3, CONFIG)
    configured(auto.strategy, grid)
    state = auto.strategy.state_dict()
    resumed = Auto(model=MODEL, num_classes=10, auxiliary=auxiliary, create=make)
    resumed.load_state_dict(state)
    assert resumed.choice == auto.strategy.choice
    pushed = len(grid.pushed)
    configured(resumed, grid, 2)
    assert resumed.taken.rounds == [1, 2]
    assert len(grid.pushed) == pushed


def test_a_round_that_is_forgotten_forgets_the_choice(auto, client_grid):
    before = auto.strategy.state_dict()
    configured(auto.strategy, client_grid(2, CONFIG))
    auto.strategy.load_state_dict(before)
    assert auto.strategy.choice is None
    assert auto.strategy.taken is None


def test_soft_labels_of_another_shape_are_set_aside(auto, client_grid, caplog):
    grid = client_grid(3, {**CONFIG, **SKEWED})
    liar = next(iter(grid.nodes))
    labels = ArrayRecord({"soft-labels": Array(np.full((1, 10), 0.1, dtype=np.float32))})
    spoil(grid, liar, lambda content: content.update({ARRAYS: labels}))
    configured(auto.strategy, grid)
    assert f"Reply of node {liar} to {LABEL_KNOWLEDGE} rejected: its soft labels are (1, 10)" in (
        caplog.text
    )
    assert auto.strategy.choice.skew > 0.5


def test_without_soft_labels_nothing_is_taken(auto, client_grid):
    grid = client_grid(3, {**CONFIG, **SKEWED})
    grid.nodes = dict.fromkeys(grid.nodes, lambda message: RecordDict({"m": MetricRecord()}))
    with pytest.raises(NothingUsableError, match="0 of 3 nodes sent usable soft labels"):
        configured(auto.strategy, grid)


def test_of_very_many_nodes_a_hundred_are_asked(auto, monkeypatch):
    messaged = []

    class Many:
        def get_node_ids(self):
            return range(1000)

        def send_and_receive(self, messages, timeout):
            messaged.extend(message.metadata.dst_node_id for message in messages)
            return []

    with pytest.raises(NothingUsableError):
        configured(auto.strategy, Many())
    assert len(set(messaged)) == strategy.MAX_ASKED


def test_a_federation_of_one_node_is_not_skewed(auto, client_grid):
    configured(auto.strategy, client_grid(1, CONFIG))
    assert auto.strategy.choice == choose(None, 1.0)


@pytest.mark.parametrize(
    ("skew", "held", "strategy"),
    [
        *((None, 1.0, "fedfa"), (0.1, 1.0, "fedfa"), (0.1, None, "fedfa")),
        (0.7, 0.6, "fedfa"),  # few samples of many classes
        (0.1, 0.2, "fedfa"),  # all nodes have the same few
        *((0.4, 0.4, "hfldd"), (0.7, 0.2, "hfldd"), (1.0, None, "hfldd")),
    ],
)
def test_labels_that_differ_ask_for_virtual_data_and_others_for_an_average(skew, held, strategy):
    assert choose(skew, held).strategy == strategy


def test_the_report_says_what_was_seen_and_taken(auto, client_grid):
    configured(auto.strategy, client_grid(2, CONFIG))
    files = auto.strategy.artifacts()
    assert json.loads(files[CHOICE])["strategy"] == auto.made[0]
    reason = auto.strategy.choice.reason
    section = rule.choice(SimpleNamespace(artifact=files.get))
    assert section.text == [f"{reason[0].upper()}{reason[1:]}."]
    assert rule.choice(SimpleNamespace(artifact=lambda name: b"")) is None


def test_formulas_are_those_of_what_was_taken(auto):
    assert strategy.formulas(auto.strategy, 3, 100, 2) == {}
    auto.strategy.choice, auto.strategy.taken = Choice("fedfa", 0.1, 1.0), Noted()
    assert strategy.formulas(auto.strategy, 3, 100, 2) == {}
    topology = SimpleNamespace(clusters=[0])
    heads = SimpleNamespace(topology=topology, expected_bits=lambda weights, rounds: 42)
    auto.strategy.choice, auto.strategy.taken = Choice("hfldd", 1.0, 0.1), heads
    assert strategy.formulas(auto.strategy, 3, 100, 2)["hfldd (HFLDD, eq. 18)"] == 42
