"""The screening grid: any strategy continues with whole replies, and it is said whose were not."""

import gc
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum

from benchmarks.in_process import FIRST_NODE as FIRST
from benchmarks.in_process import InProcessGrid
from flwr_distill.protocol.arrays import DecodedArray, as_record
from flwr_distill.protocol.method import TRAIN_PHASE, Phase
from flwr_distill.protocol.registry import method_of, phases_of
from flwr_distill.protocol.schema import EvaluateMetrics, Reply, TrainMetrics, like_the_model
from flwr_distill.server.grid import transport
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.moon.strategy import MOON
from flwr_distill.strategies.scaffold.method import CONTROL_VARIATE
from flwr_distill.strategies.scaffold.strategy import SCAFFOLD
from tests.grids import messages_to, screened, screening_grid
from tests.server.run_folder import journal as journal_of
from tests.server.run_folder import rows

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


def without_the_loss(message, content):
    del content["metrics"]["train-loss"]
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
    "what it got": rewritten(lambda start, sent: start),
    "shape": rewritten(lambda start, sent: sent[None]),
    "type": rewritten(lambda start, sent: sent.astype(np.float64)),
    "nothing": lambda message, content: RecordDict(),
    "no arrays": without_arrays,
    "another metric": with_metric("evil", 1.0),
    "misses the loss": without_the_loss,
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
        return screening_grid(inner, journal=journal, **settings), journal

    return make


def phases(strategy):
    """Phases of a run with a strategy."""
    return phases_of(method_of(type(strategy)))


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
@pytest.mark.parametrize("attack", ["NaN", "nothing", "another metric"])
def test_the_aggregate_is_that_of_rounds_without_the_hostile_nodes(grid_of, strategy, attack):
    found, without = (
        play(played, grid_of(of, phases=phases(played))[0])
        for of, played in (
            (ATTACKS[attack], STRATEGIES[strategy]()),
            (away, STRATEGIES[strategy]()),
        )
    )
    assert found.keys() == without.keys() == START.keys()
    for name, array in without.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_model_that_was_received_is_not_encoded_again_to_be_counted(grid_of, monkeypatch):
    def encode(array):
        raise AssertionError("encoded again")

    strategy, (grid, _) = CheckedFedAvg(fraction_evaluate=0.0), grid_of(None, hostile=())
    monkeypatch.setattr(DecodedArray, "data", property(encode))
    assert play(strategy, grid) is not None
    assert grid.ledger.server_bytes > 0


@pytest.mark.parametrize("attack", ATTACKS)
def test_log_and_journal_name_node_reason_and_round(grid_of, attack, tmp_path, flower_log):
    strategy, (grid, journal) = CheckedFedAvg(fraction_evaluate=0.0), grid_of(ATTACKS[attack])
    flower_log.clear()
    journal.round = 3
    play(strategy, grid)
    set_aside = journal_of(tmp_path, "set_aside")
    assert sorted(entry["set_aside"] for entry in set_aside) == [str(FIRST + p) for p in HOSTILE]
    assert {(entry["round"], entry["reply_to"]) for entry in set_aside} == {(3, "train")}
    assert flower_log.messages == [  # and nobody says it again
        f"Reply of node {entry['set_aside']} to train rejected: {entry['reason']}"
        for entry in set_aside
    ]
    assert journal.set_aside == 2
    journal.round = 4
    assert journal.set_aside == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_usable_reply_the_model_stays_and_the_run_goes_on(grid_of, strategy):
    played = STRATEGIES[strategy]()
    grid, journal = grid_of(ATTACKS["NaN"], hostile=range(NODES), phases=phases(played))
    assert play(played, grid, rounds=2) is None
    assert journal.set_aside == 2 * NODES


@pytest.mark.parametrize(("attack", "furthest"), [("huge", 300), ("what it got", 0.5)])
def test_a_norm_threshold_of_0_takes_updates_of_any_length(grid_of, attack, furthest):
    grid, journal = grid_of(ATTACKS[attack], norm_threshold=0)
    assert np.abs(play(CheckedFedAvg(fraction_evaluate=0.0), grid)["w"]).max() > furthest
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


def test_an_evaluation_counts_at_most_ten_times_the_usual_samples(memory_grid):
    def evaluation(place):
        numbers = {"num-examples": 10**9 if place == 2 else 10, "eval-accuracy": place / 10}
        return lambda message: RecordDict({"metrics": MetricRecord(numbers)})

    inner = memory_grid({place: evaluation(place) for place in range(5)})
    strategy = FedAvg(fraction_train=0.0, fraction_evaluate=1.0)
    messages = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), inner)
    replies = screening_grid(inner).send_and_receive(messages)
    told = strategy.aggregate_evaluate(1, replies)
    assert told["eval-accuracy"] == pytest.approx((0.0 + 0.1 + 10 * 0.2 + 0.3 + 0.4) / 14)


def test_a_run_tells_of_those_set_aside_in_metrics_and_report(client_grid, play):
    config = {"strategy": "fedavg", "num-rounds": 2, "min-nodes": 3}
    grid = client_grid(3, config)
    node = grid.nodes[FIRST + 1]

    def hostile(message):
        content = node(message)
        for record in content.array_records.values():
            for name, array in record.items():
                record[name] = as_record({name: array.numpy() * np.float32("nan")})[name]
        return content

    grid.nodes[FIRST + 1] = hostile
    folder = play(config, grid=grid)
    assert [row["set_aside"] for row in rows(folder)] == [0, 1, 1]
    report = (folder / "report.html").read_text()
    assert "Reply of node-1 to train rejected" in report
    assert "holds NaN or infinity" in report


def asked(answers, message_type="train", brings=START, **settings):
    """Contents of nodes' replies to one phase; that of a hostile one is None."""
    records = {"arrays": as_record(brings)} if brings else {}
    replies = screened(answers, message_type=message_type, records=records, **settings)
    return [reply.content if reply.has_content() else None for reply in replies]


def reasons(caplog):
    return [m.partition("rejected: ")[2] for m in caplog.messages if "rejected" in m]


def telling(**records):
    return lambda message: RecordDict(records)


SAMPLES = MetricRecord({"num-examples": 3})


@pytest.mark.parametrize(
    ("phase", "records", "reason"),
    [
        ("train", {"arrays": as_record(START), "metrics": MetricRecord({"num-examples": 0})}, ""),
        ("evaluate", {"metrics": MetricRecord({"num-examples": 3, "eval-accuracy": 1.5})}, ""),
        ("evaluate", {"metrics": SAMPLES}, "metrics: eval-accuracy"),
        (
            "query.describe",
            {"metrics": SAMPLES, "x": ConfigRecord()},
            "it brings a record 'x' that",
        ),
        ("query.describe", {"metrics": ConfigRecord()}, "metrics is a ConfigRecord"),
        ("query.describe", {"metrics": SAMPLES, "config": SAMPLES}, "config is a MetricRecord"),
        (
            "query.describe",
            {"metrics": SAMPLES, "config": ConfigRecord({"dataset": 3})},
            "config: ",
        ),
    ],
)
def test_a_single_reply_is_measured_by_what_its_phase_allows(caplog, phase, records, reason):
    assert asked([telling(**records)], phase) == [None]
    assert (reason or "metrics: ") in reasons(caplog)[0]


def test_a_reason_quotes_little_of_what_a_node_sent(caplog):
    told = ConfigRecord({"dataset": "x" * 10**6})
    assert asked([telling(metrics=SAMPLES, config=told)], "query.describe") == [None]
    (reason,) = reasons(caplog)
    assert reason.startswith("config: dataset = 'xxx")
    assert len(reason) == 300


def test_a_model_is_not_in_memory_once_its_replies_are_compared():
    """Else a large one stays there while nodes train on the next."""
    record = as_record(START)
    sent = weakref.ref(record)
    replies = [honest(place) for place in range(2)]
    grid = screening_grid(InProcessGrid(dict(enumerate(replies, FIRST))), model=START)
    messages = messages_to([FIRST, FIRST + 1], arrays=record)
    assert all(reply.has_content() for reply in grid.send_and_receive(messages))
    del record, messages
    gc.collect()
    assert sent() is None


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}"])
@pytest.mark.parametrize("phase", ["train", "query.describe", "query.of_another_strategy"])
def test_arrays_that_cannot_be_read_are_set_aside_in_any_phase(caplog, phase, data):
    broken = ArrayRecord(
        {"w": Array("float32", (3, 4), "numpy.ndarray", data), "n": Array(START["n"])}
    )
    replies = asked([telling(arrays=broken), telling(metrics=SAMPLES)], phase)
    assert replies[0] is None
    assert (replies[1] is None) == (phase == "train")


def test_replies_of_a_phase_that_nobody_declares_pass_whatever_else_they_are(caplog):
    odd = {"x": as_record({"y": np.array([np.nan])}), "z": ConfigRecord({"k": 1})}
    replies = asked([telling(**odd), telling()], "query.of_another_strategy")
    assert np.isnan(replies[0]["x"]["y"].numpy()).all()
    assert replies[1] == RecordDict()
    assert reasons(caplog) == []


def test_a_phase_may_allow_several_replies_and_the_first_names_what_is_wrong(caplog):
    arrays, metrics = Reply(arrays={"arrays": like_the_model}), Reply(metrics=EvaluateMetrics)
    phase = Phase("query.either", "either", (arrays, metrics))
    scored = {"metrics": MetricRecord({"num-examples": 3, "eval-accuracy": 0.5})}
    answers = [telling(arrays=as_record(START)), telling(**scored), telling(metrics=SAMPLES)]
    replies = asked(answers, phase.message_type, phases={phase.message_type: phase})
    assert [reply is None for reply in replies] == [False, False, True]
    assert reasons(caplog) == ["it brings no record 'arrays'"]


@pytest.mark.parametrize("averaged", ["own", "pool", ""])
def test_replies_are_compared_with_each_other_only_where_their_phase_says_so(caplog, averaged):
    phase = replace(TRAIN_PHASE, averaged=averaged)
    answers = [honest(place) for place in range(5)]
    answers[2] = lambda message: ATTACKS["misses the loss"](message, honest(2)(message))
    answers[4] = lambda message: ATTACKS["huge"](message, honest(4)(message))
    replies = asked(answers, phases={"train": phase})
    refused = [place for place, reply in enumerate(replies) if reply is None]
    assert refused == [2, 4] * bool(averaged)
    assert reasons(caplog) == [
        "it is missing 'train-loss' as most replies have it",
        "the norm of its arrays exceeds norm-threshold",
    ] * bool(averaged)


def test_each_array_of_a_reply_is_decoded_once_from_the_grid_to_the_aggregate(monkeypatch):
    headers = []
    read = np.lib.format.read_array_header_1_0

    def read_header(file):
        headers.append(file)
        return read(file)

    class Strange(InProcessGrid):
        """Its replies come over a wire: their arrays are bytes."""

        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                for record in reply.content.array_records.values():
                    for name, array in list(record.items()):
                        record[name] = Array(array.dtype, array.shape, array.stype, array.data)
                        came.append(record[name])
                yield reply

    came = []
    inner = Strange({FIRST + place: honest(place) for place in range(5)})
    strategy = CheckedFedAvg(fraction_evaluate=0.0)
    grid = screening_grid(inner, model=START)
    messages = strategy.configure_train(1, as_record(START), ConfigRecord(), grid)
    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", read_header)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert len(came) == 5 * len(START)
    assert len(headers) == len(came) + len(START)  # and the model that they are compared with
    assert arrays is not None


def test_a_long_step_of_a_large_model_is_seen(memory_grid):
    """Its norm is that of what changed: the models themselves are about as long."""
    start = as_record({"w": np.full(4, 1e6)})

    def node(step):
        def answer(message):
            moved = {"w": message.content["arrays"]["w"].numpy() + step}
            numbers = MetricRecord({"num-examples": 1, "train-loss": 0.1})
            return RecordDict({"arrays": as_record(moved), "metrics": numbers})

        return answer

    inner = memory_grid({place: node(1e4 if place == 3 else 1 + place / 10) for place in range(6)})
    grid = screening_grid(inner, model={"w": np.full(4, 1e6)})
    replies = grid.send_and_receive(messages_to(range(6), arrays=start))
    assert [reply.has_error() for reply in replies] == [place == 3 for place in range(6)]


@pytest.fixture
def directory(memory_grid):
    """Knows six nodes of 100 to 105 samples."""

    def about(place):
        return lambda message: RecordDict({"metrics": MetricRecord({"num-examples": 100 + place})})

    known = Directory()
    nodes = {FIRST + place: about(place) for place in range(NODES)}
    known.look_up(memory_grid(nodes), nodes)
    return known


@pytest.mark.parametrize("claim", [992 * 100, 10**9, 10**15])
def test_a_node_weighs_what_it_said_at_first_whatever_it_claims(directory, claim, caplog):
    answers = [honest(place) for place in range(NODES)]
    answers[2] = lambda message: with_metric("num-examples", claim)(message, honest(2)(message))
    replies = asked(answers, directory=directory)
    assert [r["metrics"]["num-examples"] for r in replies] == [100 + p for p in range(NODES)]
    assert [m for m in caplog.messages if "capped" in m] == [
        f"Sample count of node {FIRST + 2} capped at 102 (it claimed {claim})"
    ]


def test_nodes_that_are_gone_do_not_raise_what_others_may_claim(directory):
    """Else a node that signs on again and again would move the median with claims alone."""
    directory.num_examples |= dict.fromkeys(range(20), 10**15)
    directory.num_examples[FIRST + 2] = 10**15
    answers = [honest(place) for place in range(NODES)]
    answers[2] = lambda message: with_metric("num-examples", 10**15)(message, honest(2)(message))
    replies = asked(answers, directory=directory)
    assert [r["metrics"]["num-examples"] for r in replies] == [100, 101, 154, 103, 104, 105]


def test_what_a_node_says_at_first_counts_little_more_than_others_claims(memory_grid):
    def about(samples):
        return lambda message: RecordDict({"metrics": MetricRecord({"num-examples": samples})})

    nodes = {FIRST + p: about(10**15 if p == 0 else 100) for p in range(NODES)}
    known, trusting = Directory(), Directory(most_samples=0)
    for each in (known, trusting):
        each.look_up(memory_grid(nodes), nodes)
        each.forget(FIRST + 1)
        each.look_up(memory_grid({**nodes, FIRST + 1: about(10**9)}), nodes)
    assert [*known.samples(nodes).values()] == [150, 100, 100, 100, 100, 100]
    assert [*trusting.samples(nodes).values()] == [10**15, 100, 100, 100, 100, 100]


def test_of_two_nodes_neither_evicts_the_other_by_what_it_adds(caplog):
    schema = Reply(metrics=TrainMetrics, arrays={"arrays": like_the_model})
    phase = replace(TRAIN_PHASE, replies=(schema,))
    answers = [honest(0), honest(1)]
    answers[1] = lambda message: with_metric("dp-epsilon", 1.0)(message, honest(1)(message))
    replies = asked(answers, phases={"train": phase})
    assert [sorted(reply["metrics"]) for reply in replies] == [["num-examples", "train-loss"]] * 2
    assert reasons(caplog) == []


def test_few_replies_are_compared_with_the_runs_own_history(memory_grid, caplog):
    step = {}

    def node(place):
        def answer(message):
            moved = message.content["arrays"]["w"].numpy() + np.float32(step.get(place, 1))
            content = honest(place)(message)
            content["arrays"]["w"] = as_record({"w": moved})["w"]
            return content

        return answer

    inner = memory_grid({FIRST + place: node(place) for place in range(3)})
    grid = screening_grid(inner)

    def errors():
        messages = messages_to(inner.nodes, arrays=as_record(START))
        return [reply.has_error() for reply in grid.send_and_receive(messages)]

    assert [errors() for _ in range(4)] == [[False] * 3] * 4
    step[1] = 1e4
    assert errors() == [False, True, False]
    step[1] = 5
    assert errors() == [False] * 3


def test_weight_times_norm_is_judged(caplog):
    """Where small nodes take long steps, a long step is no outlier, but a large node's is."""
    nodes = [(1000, 0.1), (1000, 0.1), (100, 1.0), (10, 10.0), (10, 10.0)]

    def told(last):
        known = Directory()
        all_nodes = [*nodes, last]
        known.num_examples = {FIRST + place: w for place, (w, _) in enumerate(all_nodes)}
        answers = []
        for place, (weight, step) in enumerate(all_nodes):
            moving = rewritten(lambda start, sent, step=step: start + np.float32(step))
            large = with_metric("num-examples", weight)
            answers.append(lambda m, p=place, a=large, b=moving: a(m, b(m, honest(p)(m))))
        return [reply is None for reply in asked(answers, directory=known)]

    assert told((10, 1000.0)) == [False] * 6
    assert told((1000, 0.2)) == [False] * 6
    assert told((1000, 1000.0)) == [False] * 5 + [True]
    assert reasons(caplog) == ["the norm of its arrays, times samples, is far too large"]


def test_a_reply_has_at_most_the_bytes_that_its_phase_needs(monkeypatch, caplog):
    monkeypatch.setattr(transport, "ROOM", 1000)
    large = {"arrays": as_record({"x": np.zeros(1000)})}
    replies = asked([telling(**large), telling()], "query.of_another_strategy")
    assert [reply is None for reply in replies] == [True, False]
    assert re.search(r"Its reply has more than [\d,]+ bytes", caplog.text)


def test_a_rate_counts_without_the_loss_that_a_nodes_policy_keeps_back():
    def node(place):
        more = {} if place in HOSTILE else {"eval-loss": 1.0}
        numbers = {"num-examples": 10, "eval-accuracy": 0.5, **more}
        return lambda message: RecordDict({"metrics": MetricRecord(numbers)})

    contents = asked(map(node, range(NODES)), "evaluate")
    assert [dict(content["metrics"]) for content in contents] == [
        {"num-examples": 10, "eval-accuracy": 0.5}
    ] * NODES


def test_optional_metrics_take_a_time_in_proportion_to_the_nodes(monkeypatch):
    """Of three thousand nodes that evaluated they took 24 seconds a round."""
    searches = []
    contains = MetricRecord.__contains__
    monkeypatch.setattr(
        MetricRecord,
        "__contains__",
        lambda record, key: searches.append(key) or contains(record, key),
        raising=False,
    )

    def node(message):
        numbers = {"num-examples": 10, "eval-accuracy": 0.5, "eval-loss": 1.0}
        return RecordDict({"metrics": MetricRecord(numbers)})

    few = asked([node] * 10, "evaluate") and len(searches)
    many = asked([node] * 40, "evaluate") and len(searches) - few
    assert many <= 5 * few
