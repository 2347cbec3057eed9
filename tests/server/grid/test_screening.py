"""The screening grid: any strategy goes on with whole replies, and it is said whose were not."""

import json
import logging

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum

from protocol.arrays import as_record
from protocol.scaffold import CONTROL_VARIATE
from server.app import main
from server.grid.screening import ScreeningGrid
from server.record.journal import Journal
from strategies.common.checked import CheckedFedAvg
from strategies.moon import MOON
from strategies.scaffold import SCAFFOLD

FIRST = 2**64 - 1000  # as in conftest.py
NODES, HOSTILE = 6, (1, 4)
START = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "n": np.array(0)}


def honest(place):
    """A node whose weights move by about 1."""

    def answer(message):
        moved = message.content["arrays"]["w"].numpy() + np.float32(1 + place / 10)
        content = RecordDict({"arrays": as_record({"w": moved, "n": np.array(place)})})
        numbers = {"num-examples": 100 + place, "train-loss": 0.5}
        content["metrics"] = MetricRecord(numbers)
        if CONTROL_VARIATE in message.content:
            content[CONTROL_VARIATE] = as_record({"w": np.full((3, 4), place, np.float32)})
        return content

    return answer


def rewritten(change):
    """Change the weights that a node sends, given what it was sent."""

    def attack(message, content):
        start, sent = (c["arrays"]["w"].numpy() for c in (message.content, content))
        content["arrays"]["w"] = as_record({"w": change(start, sent)})["w"]
        return content

    return attack


def without_arrays(message, content):
    del content["arrays"]
    return content


def with_metric(name, value):
    def attack(message, content):
        content["metrics"][name] = value
        return content

    return attack


def away(message, content):
    raise RuntimeError("away")


TURNED = rewritten(lambda start, sent: start - (sent - start))
ATTACKS = {
    "NaN": rewritten(lambda start, sent: sent * np.nan),
    "huge": rewritten(lambda start, sent: start + 1000 * (sent - start)),
    "shape": rewritten(lambda start, sent: sent[None]),
    "type": rewritten(lambda start, sent: sent.astype(np.float64)),
    "nothing": lambda message, content: RecordDict(),
    "no arrays": without_arrays,
    "a million": with_metric("num-examples", 10**6),
    "another metric": with_metric("evil", 1.0),
}


@pytest.fixture
def grid_of(memory_grid, tmp_path):
    """Screening grid of six nodes, and its journal; the hostile ones change their replies."""

    def make(attack, hostile=HOSTILE, **settings):
        def node(place):
            answer = honest(place)
            if place not in hostile:
                return answer
            return lambda message: attack(message, answer(message))

        journal = Journal(tmp_path / "journal.jsonl")
        inner = memory_grid({FIRST + place: node(place) for place in range(NODES)})
        return ScreeningGrid(inner, deadline=60, journal=journal, **settings), journal

    return make


def play(strategy, grid, rounds=1):
    """The model after some rounds of Flower's own loop; None if it stayed as it was."""
    result = strategy.start(grid=grid, initial_arrays=as_record(START), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()} if result.arrays else None


STRATEGIES = {
    "FedAvg": lambda: FedAvg(fraction_evaluate=0.0),
    "FedProx": lambda: FedProx(fraction_evaluate=0.0, proximal_mu=0.1),
    "FedMedian": lambda: FedMedian(fraction_evaluate=0.0),
    "CheckedFedAvg": lambda: CheckedFedAvg(fraction_evaluate=0.0),
    "SCAFFOLD": lambda: SCAFFOLD(fraction_evaluate=0.0),
    "MOON, trimmed": lambda: MOON(fraction_evaluate=0.0, aggregator=FedTrimmedAvg()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attack", ["NaN", "nothing", "a million", "another metric"])
def test_the_aggregate_is_that_of_rounds_without_the_hostile_nodes(grid_of, strategy, attack):
    found = play(STRATEGIES[strategy](), grid_of(ATTACKS[attack])[0])
    without = play(STRATEGIES[strategy](), grid_of(away)[0])
    assert found.keys() == without.keys() == START.keys()
    for name, array in without.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("attack", ATTACKS)
def test_log_and_journal_name_node_reason_and_round(grid_of, attack, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    strategy, (grid, journal) = CheckedFedAvg(fraction_evaluate=0.0), grid_of(ATTACKS[attack])
    caplog.clear()
    journal.round = 3
    play(strategy, grid)
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    set_aside = [entry for entry in entries if "set_aside" in entry]
    assert [entry["set_aside"] for entry in set_aside] == [str(FIRST + p) for p in HOSTILE]
    assert {(entry["round"], entry["reply_to"]) for entry in set_aside} == {(3, "train")}
    assert caplog.messages == [  # and nobody says it again
        f"Reply of node {entry['set_aside']} to train set aside: {entry['reason']}"
        for entry in set_aside
    ]
    assert journal.set_aside == 2
    journal.round = 4
    assert journal.set_aside == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_usable_reply_the_model_stays_and_the_run_goes_on(grid_of, strategy):
    grid, journal = grid_of(ATTACKS["NaN"], hostile=range(NODES))
    assert play(STRATEGIES[strategy](), grid, rounds=2) is None
    assert journal.set_aside == 2 * NODES


def test_a_norm_threshold_of_0_takes_updates_of_any_length(grid_of):
    grid, journal = grid_of(ATTACKS["huge"], norm_threshold=0)
    assert np.abs(play(CheckedFedAvg(fraction_evaluate=0.0), grid)["w"]).max() > 300
    assert journal.set_aside == 0


@pytest.mark.parametrize("strategy", [Krum, FedMedian, FedTrimmedAvg])
def test_turned_updates_pass_and_are_for_a_robust_strategy(grid_of, strategy):
    """Honest weights move up by 1.0 to 1.5 a round, turned ones down."""
    settings = {"num_malicious_nodes": 2} if strategy is Krum else {}
    settings |= {"beta": 0.34} if strategy is FedTrimmedAvg else {}
    grid, journal = grid_of(TURNED)
    moved = play(strategy(fraction_evaluate=0.0, **settings), grid)["w"] - START["w"]
    assert journal.set_aside == 0
    assert ((moved > 0.99) & (moved < 1.51)).all()


def test_a_hostile_evaluation_is_set_aside_too(memory_grid):
    def evaluation(place):
        numbers = {"num-examples": 10**9 if place == 2 else 10, "eval-accuracy": place / 10}
        return lambda message: RecordDict({"metrics": MetricRecord(numbers)})

    inner = memory_grid({place: evaluation(place) for place in range(5)})
    strategy = FedAvg(fraction_train=0.0, fraction_evaluate=1.0)
    messages = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), inner)
    replies = ScreeningGrid(inner, deadline=60).send_and_receive(messages)
    told = strategy.aggregate_evaluate(1, replies)
    assert told["eval-accuracy"] == pytest.approx((0.0 + 0.1 + 0.3 + 0.4) / 4)


def test_a_run_tells_of_those_set_aside_in_metrics_and_report(client_grid, tmp_path):
    run_config = {"strategy": "fedavg", "num-rounds": 2, "min-nodes": 3, "runs-dir": str(tmp_path)}
    grid = client_grid(3, run_config)
    node = grid.nodes[FIRST + 1]

    def hostile(message):
        content = node(message)
        for record in content.array_records.values():
            for name, array in record.items():
                record[name] = as_record({name: array.numpy() * np.float32("nan")})[name]
        return content

    grid.nodes[FIRST + 1] = hostile
    main(grid, Context(7, 1, {}, RecordDict(), run_config))
    lines = (tmp_path / "7" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["set_aside"] for line in lines] == [0, 1, 1]
    report = (tmp_path / "7" / "report.html").read_text()
    assert "Reply of node 1 to train set aside" in report
    assert "holds NaN or infinity" in report
