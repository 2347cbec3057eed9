"""Auto has strategies race that suit the labels, and leaves everything else to the best one."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.method import CHOICE
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.server.record.packing import pack, unpack
from flwr_distill.strategies.auto import Auto, panel, strategy
from flwr_distill.strategies.auto.method import AutoSettings
from flwr_distill.strategies.auto.race import MOST_CONTESTS, Race
from flwr_distill.strategies.auto.rule import MOST, candidates
from flwr_distill.strategies.auto.skew import label_skew, one_class_labels
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.method import LABEL_KNOWLEDGE
from flwr_distill.task.datasets import auxiliary_images
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model

from .rounds import MODEL, SPEC, spoil, start

CONFIG = {"partition.scheme": "iid", "train.local-epochs": 1}


class Noted(FedAvg):
    """FedAvg with a state and files; notes the models that it is given."""

    def __init__(self):
        super().__init__(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0)
        self.rounds = []
        self.given = []

    def configure_train(self, server_round, arrays, config, grid):
        self.rounds.append(server_round)
        self.given.append(arrays)
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


def new_auto(**arguments):
    """An Auto on digits; `made` has the names of the strategies that it had made."""

    def create(name):
        made.append(name)
        return make(name)

    made = []
    common = {"model": MODEL, "num_classes": 10, "auxiliary": auxiliary, "create": create}
    return SimpleNamespace(strategy=Auto(**common, **arguments), made=made)


@pytest.fixture
def auto():
    return new_auto()


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
    assert ("frozen network" in auto.candidates.reason) == (part == "head")


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
    assert low <= auto.strategy.candidates.skew <= high
    assert auto.strategy.candidates.held == held


def test_where_nodes_hold_most_classes_nobody_is_asked_and_what_was_taken_does_the_rounds(
    auto, client_grid
):
    grid = client_grid(4, CONFIG)
    assert [m.metadata.message_type for m in configured(auto.strategy, grid)] == ["train"] * 4
    configured(auto.strategy, grid, 2)
    assert not asked(grid)
    assert auto.strategy.candidates == candidates(None, 1.0)
    assert "100% of the classes" in auto.strategy.candidates.reason
    assert auto.made == ["fedfa"]
    assert auto.strategy.strategies["fedfa"].rounds == [1, 2]
    assert auto.strategy.artifacts()["rounds.txt"] == b"1"


@pytest.mark.parametrize(
    ("alpha", "leader"), [(1.0, "hfldd"), (1e6, "fedfa")], ids=["labels differ", "labels alike"]
)
def test_of_large_images_labels_that_differ_take_hfldd_though_nodes_hold_most_classes(
    client_grid, alpha, leader
):
    auto = new_auto(large_images=True)
    grid = client_grid(4, {**CONFIG, "partition.scheme": "dirichlet", "partition.alpha": alpha})
    configured(auto.strategy, grid)
    assert auto.strategy.candidates.held > MOST
    assert asked(grid) == sorted(grid.nodes)
    assert auto.strategy.race.leader == leader


def test_nodes_that_hold_most_classes_need_not_say_how_labels_differ(client_grid, caplog):
    auto = new_auto(large_images=True)
    grid = client_grid(3, CONFIG)
    for node in grid.nodes:
        spoil(grid, node, lambda content: content.pop(ARRAYS), LABEL_KNOWLEDGE)
    configured(auto.strategy, grid)
    assert auto.strategy.candidates == candidates(None, 1.0)
    assert "0 of 3 nodes sent usable soft labels" in caplog.text


def test_hfldd_forms_its_clusters_by_the_labels_that_auto_asked_for(auto, client_grid, monkeypatch):
    monkeypatch.setattr(strategy, "MAX_ASKED", 3)
    grid = client_grid(4, {**CONFIG, **SKEWED})
    configured(auto.strategy, grid)
    assert auto.made == auto.strategy.race.left == ["hfldd"]
    assert asked(grid) == sorted(grid.nodes)
    assert not auto.strategy.strategies["hfldd"].labels


def test_a_resumed_run_goes_on_with_what_was_taken_and_asks_nobody(auto, client_grid):
    grid = client_grid(3, CONFIG)
    configured(auto.strategy, grid)
    state = auto.strategy.state_dict()
    resumed = Auto(model=MODEL, num_classes=10, auxiliary=auxiliary, create=make)
    resumed.load_state_dict(state)
    assert resumed.candidates == auto.strategy.candidates
    pushed = len(grid.pushed)
    configured(resumed, grid, 2)
    assert resumed.strategies["fedfa"].rounds == [1, 2]
    assert len(grid.pushed) == pushed


def test_a_round_that_is_forgotten_forgets_the_choice(auto, client_grid):
    before = auto.strategy.state_dict()
    configured(auto.strategy, client_grid(2, CONFIG))
    auto.strategy.load_state_dict(before)
    assert auto.strategy.candidates is None
    assert not auto.strategy.strategies


def test_soft_labels_of_another_shape_are_set_aside(auto, client_grid, caplog):
    grid = client_grid(3, {**CONFIG, **SKEWED})
    liar = next(iter(grid.nodes))
    labels = ArrayRecord({"soft-labels": Array(np.full((1, 10), 0.1, dtype=np.float32))})
    spoil(grid, liar, lambda content: content.update({ARRAYS: labels}))
    configured(auto.strategy, grid)
    assert f"Reply of node {liar} to {LABEL_KNOWLEDGE} rejected: its soft labels are (1, 10)" in (
        caplog.text
    )
    assert auto.strategy.candidates.skew > 0.5


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


def test_nodes_that_are_away_for_a_moment_before_the_first_round_are_waited_for(
    auto, client_grid, monkeypatch
):
    grid = client_grid(2, CONFIG)
    nodes, grid.nodes = grid.nodes, {}
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(grid, "nodes", nodes))
    assert len(configured(auto.strategy, grid)) == 2


def test_a_federation_of_one_node_is_not_skewed(auto, client_grid):
    configured(auto.strategy, client_grid(1, CONFIG))
    assert auto.strategy.candidates == candidates(None, 1.0)


@pytest.mark.parametrize(
    ("skew", "held", "all_train", "strategy"),
    [
        (None, 1.0, False, "fedfa"),
        *((0.1, held, all_train, "fedfa") for held in (None, 1.0) for all_train in (False, True)),
        *((0.15, None, False, "fedfa"), (0.15, None, True, "hfldd"), (0.15, 1.0, True, "hfldd")),
        (0.7, 0.8, False, "fedfa"),  # few samples of many classes
        (0.7, 0.8, True, "hfldd"),
        (None, 0.8, True, "fedfa"),
        (0.1, 0.2, False, "fedfa"),  # all nodes have the same few
        *((0.4, 0.4, False, "hfldd"), (0.7, 0.2, False, "hfldd"), (1.0, None, False, "hfldd")),
    ],
)
def test_labels_that_differ_ask_for_virtual_data_and_others_for_an_average(
    skew, held, all_train, strategy
):
    names = candidates(skew, held, all_train=all_train).names
    assert names[0] == strategy
    assert "fedavg" in names
    assert ("hfldd" in names) == (strategy == "hfldd")  # virtual data are not sent for nothing


def raced(race, num_rounds, accuracy_of, samples=1000):
    """Names of who trains each round of a race."""
    names = []
    for _ in range(num_rounds):
        names.append(race.next)
        race.record(names[-1], accuracy_of(names[-1]), samples)
    return names


@given(st.integers(2, 3), st.integers(1, 60), st.integers(0, 30), st.data())
def test_the_rounds_that_are_lost_are_at_most_the_budget_and_the_leader_trains_the_last_one(
    num_candidates, num_rounds, budget, data
):
    budget = min(budget, (num_rounds - 1) // 2)
    race = Race.of("abc"[:num_candidates], budget, num_rounds)
    raced(race, num_rounds - 1, lambda name: data.draw(st.floats(0, 1)))
    assert not race.contest
    raced(race, 1, lambda name: 0.0)
    assert num_rounds - race.kept <= budget
    assert len(race.contests) <= MOST_CONTESTS
    assert bool(race.contests) == (budget >= num_candidates - 1)


def test_contests_are_spread_evenly_over_the_run():
    names = raced(Race.of("ab", 4, 20), 20, {"a": 0.9, "b": 0.89}.get)
    assert [place for place, name in enumerate(names) if name == "b"] == [1, 6, 11, 16]


def test_without_a_budget_the_likeliest_trains_alone():
    assert raced(Race.of("ab", 0, 20), 20, {"a": 0.1, "b": 0.9}.get) == ["a"] * 20


@pytest.mark.parametrize(
    ("first", "later", "samples", "leads"),
    [
        ((0.50, 0.54), (0.50, 0.54), 1000, "a"),  # a standard error is sqrt(2/4/1000) = .022
        ((0.50, 0.49), (0.50, 0.55), 1000, "b"),
        ((0.50, 0.49), (0.50, 0.55), 100, "a"),
        ((0.50, 0.55), (0.50, 0.51), 1000, "a"),  # and takes the lead again
        ((0.95, 0.90), (0.95, 1.00), 20, "a"),
    ],
)
def test_the_likeliest_leads_unless_another_is_ahead_by_more_than_chance(
    first, later, samples, leads
):
    race = Race.of("ab", 2, 10)
    raced(race, 2, dict(zip("ab", first, strict=True)).get, samples)
    raced(race, 8, dict(zip("ab", later, strict=True)).get, samples)
    assert race.leader == leads


def test_who_is_far_behind_in_a_contest_but_the_first_leaves_and_costs_no_more_rounds():
    names = raced(Race.of("ab", 4, 20), 20, {"a": 0.9, "b": 0.5}.get)
    assert names.count("b") == 2
    names = raced(Race.of("ab", 4, 20), 20, {"a": 0.9, "b": 0.89}.get)
    assert names.count("b") == 4


@pytest.mark.parametrize("unknown", ["a", "b", "ab"])
def test_a_contest_in_which_a_model_is_not_evaluated_changes_nothing(unknown):
    race = Race.of("ab", 2, 10)
    raced(race, 2, {"a": 0.1, "b": 0.9}.get)
    assert race.left == ["b", "a"]
    known = {"a": 0.1, "b": 0.9}
    raced(race, 6, lambda name: None if name in unknown else known[name])
    assert len(race.contests) == 2
    assert race.left == ["b", "a"]


def test_one_that_cannot_train_leaves_the_race_and_the_others_continue():
    race = Race.of("abc", 4, 20)
    race.record("a", 0.4, 1000)
    race.record("b", 0.5, 1000)
    race.retire("c")
    assert race.left == ["b", "a"]
    race.retire("b")
    assert raced(race, 3, {"a": 0.1}.get) == ["a"] * 3


class Racing:
    """Rounds of an Auto over two candidates, whose models nodes find as good as `accuracies`."""

    def __init__(self, client_grid, accuracies):
        self.grid = client_grid(4, {**CONFIG, **SKEWED})
        self.accuracies = accuracies
        self.strategy = self.make()

    @staticmethod
    def make():
        def create(name):
            return make(name) if name == "hfldd" else Noted()

        return Auto(
            model=MODEL,
            num_classes=10,
            auxiliary=auxiliary,
            create=create,
            budget=2,
            num_rounds=9,
        )

    def play(self, server_round, loop=None):
        """A round as the server's loop has it; the name of who trained, and its model."""
        auto = self.strategy
        given = start() if loop is None else loop
        messages = list(auto.configure_train(server_round, given, ConfigRecord(), self.grid))
        name = auto._running
        replies = self.grid.send_and_receive(messages)
        arrays, _ = auto.aggregate_train(server_round, replies)
        asked = list(auto.configure_evaluate(server_round, arrays, ConfigRecord(), self.grid))
        replies = [self.evaluated(message, self.accuracies[name]) for message in asked]
        auto.aggregate_evaluate(server_round, replies)
        return name, arrays, len(asked)

    @staticmethod
    def evaluated(message, accuracy):
        metrics = MetricRecord({"num-examples": 10, "eval-accuracy": accuracy, "eval-loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


@pytest.fixture
def racing(client_grid):
    return Racing(client_grid, {"hfldd": 0.2, "fedavg": 0.6})


ORDER = ["hfldd", "fedavg", "fedavg", "fedavg", "fedavg", "hfldd", "fedavg", "fedavg", "fedavg"]
"""Who trains: the contests are in rounds 1 and 2, and 5 and 6."""


def test_all_start_from_the_best_model_and_the_run_continues_with_the_winners(racing):
    model, names, models = None, [], {}
    for server_round in range(1, 10):
        name, model, evaluated = racing.play(server_round, model)
        names.append(name)
        models[server_round] = model
        assert evaluated == (4 if server_round in (1, 2, 5, 6) else 0)
    assert sorted(names[4:6]) == ["fedavg", "hfldd"]
    assert [*names[:4], *names[6:]] == [*ORDER[:4], *ORDER[6:]]
    given = racing.strategy.strategies["fedavg"].given
    trained = [r for r in range(1, 10) if names[r - 1] == "fedavg"]
    started = dict(zip(trained, given, strict=True))
    assert started[3] is models[2]
    in_contest = names.index("fedavg", 4) + 1
    assert started[in_contest] is models[4]
    assert started[7] is models[in_contest]  # and not the loser's, which the loop may have
    found = json.loads(racing.strategy.artifacts()[CHOICE])
    assert found["strategy"] == "fedavg"
    assert found["contests"] == [{"fedavg": 0.6, "hfldd": 0.2}] * 2
    assert [(t["strategy"], t["rounds"]) for t in found["tried"]] == [("hfldd", 2), ("fedavg", 7)]


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_run_that_stops_resumes_in_or_between_contests(racing, stop):
    model = None
    for server_round in range(1, stop + 1):
        _, model, _ = racing.play(server_round, model)
    arrays = {}
    state = unpack(json.loads(json.dumps(pack(racing.strategy.state_dict(), arrays))), arrays)
    names = [racing.play(server_round, model)[0] for server_round in range(stop + 1, 10)]
    racing.strategy = racing.make()
    racing.strategy.load_state_dict(state)
    given = racing.strategy.strategies["fedavg"].given if stop > 1 else []
    assert [racing.play(server_round, model)[0] for server_round in range(stop + 1, 10)] == names
    assert "fedavg" in names
    assert stop != 2 or as_arrays(given[0]).keys() == as_arrays(model).keys()


def test_after_a_lost_contest_a_round_that_fails_does_not_pass_on_the_losers_model(racing):
    racing.accuracies = {"hfldd": 0.9, "fedavg": 0.1}
    _, won, _ = racing.play(1)
    _, lost, _ = racing.play(2, won)
    auto, grid = racing.strategy, racing.grid
    for server_round in (3, 4):
        messages = list(auto.configure_train(server_round, lost, ConfigRecord(), grid))
        sent = as_arrays(messages[0].content.array_records[ARRAYS])
        for name, array in as_arrays(won).items():
            np.testing.assert_array_equal(sent[name], array)
        auto.aggregate_train(server_round, [Message(Error(0, "no"), reply_to=messages[0])])


def test_where_no_node_evaluates_the_likeliest_leads_and_the_log_says_so(racing, caplog):
    racing.evaluated = lambda message, accuracy: Message(Error(0, "no"), reply_to=message)
    names = [racing.play(server_round)[0] for server_round in range(1, 10)]
    assert names[-1] == "hfldd"
    assert "no node has evaluated round 1, by hfldd" in caplog.text
    found = json.loads(racing.strategy.artifacts()[CHOICE])
    assert found["contests"][0] == {"hfldd": None, "fedavg": None}  # and not 0


def test_without_soft_labels_of_its_own_hfldd_leaves_and_the_run_goes_on(racing, monkeypatch):
    def fails(self, *arguments):
        raise NothingUsableError("no soft labels")

    monkeypatch.setattr(HFLDD, "configure_train", fails)
    assert [racing.play(server_round)[0] for server_round in (1, 2, 3)] == ["fedavg"] * 3


def test_a_race_without_held_out_samples_is_refused():
    run = SimpleNamespace(num_rounds=20, train=SimpleNamespace(holdout=0.0))
    with pytest.raises(SettingsError, match=r"auto\.budget"):
        Auto.from_run(AutoSettings(budget=0.2), run)


def test_the_report_says_what_was_seen_and_taken(auto, client_grid):
    configured(auto.strategy, client_grid(2, CONFIG))
    files = auto.strategy.artifacts()
    assert json.loads(files[CHOICE])["strategy"] == auto.made[0]
    section = panel.choice(SimpleNamespace(artifact=files.get))
    assert "100% of the classes" in section.text[0]
    assert panel.choice(SimpleNamespace(artifact=lambda name: b"")) is None


def test_the_report_shows_who_trained_and_each_contest(racing):
    for server_round in range(1, 8):
        racing.play(server_round)
    section = panel.choice(SimpleNamespace(artifact=racing.strategy.artifacts().get))
    trained, contests = section.tables
    assert [row[:2] for row in trained.rows] == [["hfldd", "2"], ["fedavg", "5"]]
    assert contests.columns == ("#contest", "#hfldd", "#fedavg", "leads")
    assert contests.rows == [[number, "20.0%", "60.0%", "fedavg"] for number in "12"]


def test_formulas_are_of_the_rounds_that_each_one_trained(auto):
    assert strategy.formulas(auto.strategy, 3, 100, 9) == {}
    topology = SimpleNamespace(clusters=[0])
    heads = SimpleNamespace(
        topology=topology, expected_bits=lambda weights, rounds: weights * rounds
    )
    auto.strategy.race = Race(["fedavg", "hfldd"], [], rounds={"fedavg": 7, "hfldd": 2})
    auto.strategy.strategies = {"fedavg": Noted(), "hfldd": heads}
    assert strategy.formulas(auto.strategy, 3, 100, 9)["hfldd (HFLDD, eq. 18)"] == 200


@pytest.mark.parametrize(
    ("large_images", "settings", "all_train"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"heads": "one"}, False),
        (False, {"heads": "all"}, True),
        (True, {"refresh_every": 2}, False),
        (True, {"votes": True, "rotate": False, "complete_clusters": False}, False),
    ],
)
def test_of_large_images_all_nodes_train_with_hfldd_unless_its_settings_say_otherwise(
    large_images, settings, all_train, client_grid
):
    quick = {"auxiliary_size": 50, "distiller": "dm", "distilled_size": 4, "distill_steps": 1}
    racing = Auto(
        model=MODEL,
        num_classes=10,
        auxiliary=auxiliary,
        create=lambda name: HFLDD(**quick, **settings) if name == "hfldd" else Noted(),
        large_images=large_images,
    )
    grid = client_grid(4, {**CONFIG, **SKEWED})
    messages = list(racing.configure_train(1, start(), ConfigRecord(), grid))
    clusters = racing.topology.clusters
    num_heads = len(clusters)
    assert len(messages) == (4 if all_train else num_heads)
    assert num_heads < 4
    state = racing.state_dict()
    racing.load_state_dict(state)
    assert racing.strategies["hfldd"].all_train == all_train
