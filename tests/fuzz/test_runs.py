"""Whatever one or two of five nodes reply, a run of any method continues or says why not.

Here runs the whole server, from the first meeting to the checkpoints, on nodes that are functions.
"""

import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.in_process import FIRST_NODE, InProcessGrid
from flwr_distill.distill.analytic import Sums
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.meeting import requirement_of
from flwr_distill.protocol.registry import all_methods, phases_of
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.server.grid.pipeline import QuorumError
from flwr_distill.server.hooks import Hook, Hooks
from flwr_distill.server.names import names_in_log
from flwr_distill.server.record.history import History
from flwr_distill.server.record.journal import Journal
from flwr_distill.server.record.packing import pack
from flwr_distill.server.record.resume import state_of
from flwr_distill.server.roster import Roster, meet_nodes
from flwr_distill.server.rounds import NothingLearntError, Rounds
from flwr_distill.server.settings import composed_settings
from flwr_distill.server.strategy import strategy_of_run
from flwr_distill.server.task import Task
from flwr_distill.strategies.analytic.method import record_of
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.settings import nested
from tests.grids import screening_grid

from .conftest import FUZZ
from .test_replies import KEYS, NAMES, records, replies

NODES, ROUNDS = 5, 3
SPEC = DataSpec("toy", (1, 4, 4), 3, (0.5,), (0.5,))
NAMED = (NothingUsableError, NothingLearntError, QuorumError, TooFewNodesError)
LONGEST_LINE = 5000
MOST_BYTES = 50e6
"""Of three rounds of a model of 100 numbers, with replies of some kB and texts of 100 kB."""
LITTLE = {
    "hfldd.auxiliary-size": 8,
    "hfldd.distilled-size": 3,
    "fedhead.distill-epochs": 1,
    "fedhead.server-epochs": 1,
    "fedhead.reference-size": 8,
    "fedmd.auxiliary-size": 8,
    "fedlgd.global-steps": 1,
    "fedlgd.global-per-class": 1,
    "fedlgd.every": 2,
    "fedaf.per-class": 2,
    "fedaf.server-epochs": 1,
    "feddm.per-class": 2,
    "feddm.server-epochs": 1,
    "fedseq.cluster-size": 2,
    "fedseq-zaccone.auxiliary-size": 8,
    "dynafed.trajectory": 1,
    "dynafed.distill-steps": 1,
    "dynafed.follow-steps": 1,
    "qfedavg.q": 1.0,
}
names = st.sampled_from(sorted(NAMES | {"metrics", "parcel", "parcel.1", "parcel.٣"}))
keys = st.sampled_from(sorted(KEYS | {"\n\x1b[31m", "rejected.0", "x" * 10**5}))
texts = st.text(max_size=9) | st.sampled_from(
    [str(FIRST_NODE + 1), "<script>", "\n\x1b[31mRound 9", "\ud800", "x" * 10**5]
)
numbers = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 10**15, 1e-300, 1e15, 1e308, np.nan])
values = numbers | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.lists(st.integers(0, 9))
errors = st.builds(Error, st.sampled_from([0, 100, 204, 10**6]), texts)
factors = st.sampled_from([np.nan, np.inf, 0.0, -1.0, 1e3, -1e9, 1e30, 3e38])


def scaled(array, factor):
    with np.errstate(all="ignore"):
        return (array * factor).astype(array.dtype)


@st.composite
def rewritten_array(draw, array):
    """An array as a hostile node may send it in place of an honest one."""
    match draw(st.sampled_from(["scaled", "type", "shape", "bytes", "extreme"])):
        case "scaled":
            return Array(np.asarray(scaled(array, draw(factors))))
        case "type":
            kind = draw(st.sampled_from(["float16", "float64", "int8", "complex64", "bool"]))
            with np.errstate(all="ignore"):
                return Array(np.asarray(scaled(array, draw(factors))).astype(kind))
        case "shape":
            return Array(array[None])
        case "bytes":
            return Array(str(array.dtype), array.shape, "numpy.ndarray", draw(st.binary()))
        case _ if array.dtype.kind == "f":
            return Array(np.full_like(array, draw(st.sampled_from([-1, 1])) * 3e38))
        case _:
            return Array(np.full_like(array, draw(st.sampled_from([-(2**63), 2**63 - 1]))))


@st.composite
def rewritten(draw, content):
    """An honest reply with a few things changed."""
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(content)) if content else names)
        record = content.get(name)
        match draw(st.sampled_from(["change", "change", "change", "remove", "add"])):
            case "remove":
                content.pop(name, None)
            case "add":
                content[draw(names)] = draw(records)
            case _ if isinstance(record, ArrayRecord) and record:
                key = draw(st.sampled_from(sorted(record)))
                record[key] = draw(rewritten_array(record[key].numpy()))
            case _ if isinstance(record, MetricRecord):
                key = draw(st.sampled_from(sorted(record)) if record else keys)
                record[draw(st.just(key) | keys)] = draw(values)
            case _ if isinstance(record, ConfigRecord):
                key = draw(st.sampled_from(sorted(record)) if record else keys)
                value = texts | values | st.binary() | st.lists(texts, max_size=3)
                record[draw(st.just(key) | keys)] = draw(value)
    return content


@dataclass
class Honest:
    """An honest node that does not learn: its weights move at random."""

    place: int
    model: dict
    draws: np.random.Generator = field(init=False)

    def __post_init__(self):
        self.draws = np.random.default_rng(self.place)

    def __call__(self, message):
        content = message.content
        if "arrays" in content:
            types = {name: array.dtype for name, array in self.model.items()}
            arrays = as_arrays(content["arrays"])  # Flower's strategies make counts floats
            self.model = {name: array.astype(types[name]) for name, array in arrays.items()}
        category, _, action = message.metadata.message_type.partition(".")
        reply = getattr(self, action or category)(content)
        config = content.config_records
        for name, route in config.items():
            if name.startswith("route"):
                reply[name.replace("route", "parcel")] = self.parcel(route)
        return RecordDict(reply)

    def parcel(self, route):
        direct = bool(route["address"]) and route["link"] != "relay"
        payload = {} if direct else {"payload": bytes(60)}
        link = "direct" if direct else "relay"
        return ConfigRecord({"link": link, "token": route["token"], "num-bytes": 60, **payload})

    def moved(self):
        moved = {
            name: (w + self.draws.normal(0, 0.1, w.shape)).astype(w.dtype)
            for name, w in self.model.items()
        }
        return {n: w.clip(0.01) if n.endswith("running_var") else w for n, w in moved.items()}

    def metrics(self, **more):
        numbers = {"num-examples": 20 + self.place, "num-steps": 4, "train-loss": 1.0}
        more = {key.replace("_", "-"): value for key, value in more.items()}
        return MetricRecord({**numbers, "train-accuracy": 0.5, **more})

    def describe(self, content):
        address = "10.0.0.1:9" if self.place % 2 else ""
        introduction = {"public-key": bytes(32), "address": address, "permit-key": bytes(32)}
        metrics = MetricRecord({"num-examples": 20 + self.place, "partition-id": self.place})
        config = ConfigRecord({"name": f"ward-{self.place}", "classes": [0, 1, 2]})
        return {"metrics": metrics, "config": config, "introduction": ConfigRecord(introduction)}

    def train(self, content):
        reply = {"arrays": as_record(self.moved()), "metrics": self.metrics()}
        if "control-variate" in content:
            weights = [name for name in self.model if name.endswith(("weight", "bias"))]
            change = {name: 0.1 * self.model[name] for name in weights}
            reply["control-variate"] = as_record(change)
        if "clipping_norm" in content.get("config", {}):
            reply["metrics"]["norm_bit"] = 1
        return reply

    def virtual(self, content):
        reply = self.train(content)
        if content["virtual"]["gradient"]:
            weights = {n: w for n, w in self.model.items() if w.ndim > 1}
            reply["gradient"] = as_record(weights)
        return reply

    def pool(self, content):
        return {"arrays": as_record(self.moved()), "metrics": self.metrics(num_parcels=NODES)}

    def means(self, width):
        return as_record(
            {
                "classes": np.array([0, 2]),
                "counts": np.array([5, 15 + self.place]),
                **{
                    name: self.draws.dirichlet(np.ones(d), 2).astype(np.float32)
                    for name, d in width.items()
                },
            }
        )

    def prototypes(self, content):
        return {"prototypes": self.means({"prototypes": 4}), "metrics": self.metrics()}

    def nearest_prototype(self, content):
        reply = self.evaluate(content)
        reply["metrics"]["classifier-accuracy"] = 0.5
        return reply

    def knowledge(self, content):
        own = self.means({"features": 4, "predictions": 3})
        return {**self.train(content), "hyper-knowledge": own}

    def analytic_sums(self, content):
        features = self.draws.dirichlet(np.ones(4), 20 + self.place)
        sums = Sums.of(features, self.draws.integers(3, size=len(features)), 3)
        return {"sums": record_of(sums), "metrics": self.metrics()}

    def consensus(self, content):
        logits = self.draws.normal(size=(8, 3)).astype(np.float32)
        return {"logits": as_record({"logits": logits}), "metrics": self.metrics()}

    def own_model(self, content):
        return self.evaluate(content)

    def evaluate(self, content):
        numbers = {"num-examples": 5, "eval-accuracy": 0.5, "eval-loss": 1.0}
        return {"metrics": MetricRecord(numbers)}

    def label_knowledge(self, content):
        size = content["config"]["auxiliary-size"]
        chances = self.draws.dirichlet(np.ones(3), size).astype(np.float32)
        metrics = MetricRecord({"num-examples": 20 + self.place, "own-divergence": 0.1})
        return {"arrays": as_record({"soft-labels": chances}), "metrics": metrics}

    def distill(self, content):
        numbers = {"num-examples": 3, "num-values": 48, "highest-cosine": 0.5}
        return {"metrics": MetricRecord(numbers)}

    def receive(self, content):
        ranks = [int(name[7:]) for name in content if name.startswith("parcel.")]
        return {"metrics": MetricRecord({"num-examples": 30, "kept-parcels": ranks, "rejected": 0})}

    def sector(self, content):
        return {"metrics": self.metrics(update_norm=2 + self.place / 100)}

    def hand_in(self, content):
        return {}

    hand_out = hand_in

    def aggregate_sector(self, content):
        return {"arrays": as_record(self.moved()), "config": ConfigRecord()}

    def distill_sector(self, content):
        metrics = MetricRecord({"distill-loss": 0.1, "distill-epochs": 1})
        return {"arrays": as_record(self.moved()), "metrics": metrics}

    def class_knowledge(self, content):
        means = {
            "classes": np.array([0, 2]),
            "counts": np.array([2, 2]),
            "logits": self.draws.normal(size=(2, 3)).astype(np.float32),
            "soft-labels": self.draws.dirichlet(np.ones(3), 2).astype(np.float32),
        }
        return {"metrics": MetricRecord({"num-examples": 4}), "knowledge": as_record(means)}

    def feddm_distill(self, content):
        images = torch.from_numpy(self.draws.normal(size=(4, *SPEC.shape)).astype(np.float32))
        labels = torch.tensor([0, 0, 2, 2])
        data = VirtualData(images, labels, method="feddm", steps=1, seed=0, init="class-stats")
        sent = ConfigRecord({"payload": data.to_bytes()})
        return {"metrics": MetricRecord({"num-examples": 4}), "virtual-data": sent}

    fedaf_distill = feddm_distill

    def fedseq_zaccone_confidence(self, content):
        chances = self.draws.dirichlet(np.ones(3)).tolist()
        return {"metrics": MetricRecord({"num-examples": 20 + self.place, "confidence": chances})}

    def fedseq_turn(self, content):
        return {"metrics": self.metrics()}

    fedseq_last = train

    def fedseq_again(self, content):
        return {} if "route" in content else {"arrays": as_record(self.moved())}

    def fedseq_pass_on(self, content):
        return {}

    fedseq_zaccone_turn, fedseq_zaccone_last, fedseq_zaccone_again = (
        fedseq_turn,
        fedseq_last,
        fedseq_again,
    )


class Results(Hook):
    """Takes the results of a run, and checks that they can be written and are finite."""

    def __init__(self):
        self.models = []

    def on_run_start(self, run):
        json.dumps(run.settings, allow_nan=False)

    def on_round_end(self, end):
        json.dumps(end.topology, allow_nan=False)

    def on_checkpoint(self, checkpoint):
        json.dumps(pack(checkpoint.state, {}), allow_nan=False)

    def on_run_end(self, end):
        json.dumps([end.formula_bytes, end.warnings], allow_nan=False)
        assert all(size < 1e12 for size in end.formula_bytes.values())
        assert all(isinstance(content, bytes) for content in end.artifacts.values())
        self._take(end.model)

    def on_failure(self, error, model):
        self._take(model)

    def _take(self, model):
        if model is not None:
            self.models.append(model)


class Lines(logging.Handler):
    """Keeps the warnings and errors of the log."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def toy(batch_norm):
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(4)] if batch_norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), *between, nn.Linear(4, 3))


tables = cache(composed_settings)


@cache
def settings_of(name, links, defended):
    """Settings of a short run; with the method's rules against hostile nodes if `defended`."""
    config = {
        "strategy": name,
        "num-rounds": ROUNDS,
        "min-nodes": 3,
        "fraction-evaluate": 1.0,
        "server-device": "cpu",
        "links": links,
        **LITTLE,
        **(all_methods()[name].defaults.get("defence", {}) if defended else {}),
    }
    return tables().checked(nested(config), "run config")


def node_of(answer, place, start):
    own = Honest(place, start)
    return lambda message: answer(message, own)


def play(name, answers, folder, links="relay", defended=False):
    """Run a method to the end: its strategy, the grid, the first model, those kept, and the log."""
    of_run = settings_of(name, links, defended)
    strategy_class, method = find_strategy(name)
    model = toy(batch_norm=not name.startswith("dp-"))
    task = Task(SPEC, model, ArrayRecord(model.state_dict()), torch.device("cpu"), None, ())
    directory = Directory(requirement_of(method), of_run.most_samples)
    strategy = strategy_of_run(of_run, strategy_class, method, task, directory)
    start = as_arrays(task.start)
    nodes = {FIRST_NODE + i: node_of(answer, i, start) for i, answer in enumerate(answers)}
    lines, results = Lines(), Results()
    FLOWER_LOGGER.addHandler(lines)
    try:
        with (
            names_in_log(directory.names),
            Journal(folder / "journal.jsonl") as journal,
        ):
            grid = screening_grid(
                InProcessGrid(nodes),
                deadline=60,
                journal=journal,
                hooks=(hooks := Hooks(journal, results)),
                phases=phases_of(method),
                directory=directory,
                model=start,
            )
            roster = Roster(directory)
            with suppress(*NAMED):
                meet_nodes(grid, roster, of_run.min_nodes, 60)
                Rounds(
                    of_run,
                    1,
                    folder,
                    task,
                    method,
                    strategy,
                    grid,
                    roster,
                    History(grid.ledger, journal),
                    journal,
                    hooks,
                ).run()
    finally:
        FLOWER_LOGGER.removeHandler(lines)
    return strategy, grid, start, results.models, lines.lines


def honest(message, node):
    return node(message)


def finite(state):
    """Whether all numbers in nested data are finite."""
    if isinstance(state, dict):
        return all(map(finite, state.values()))
    if isinstance(state, list | tuple):
        return all(map(finite, state))
    if isinstance(state, ArrayRecord):
        return finite(as_arrays(state))
    if isinstance(state, float | np.ndarray):
        return bool(np.isfinite(state).all())
    return True


METHODS = sorted(all_methods())
METHODS_TO_LEARN = (
    *("auto", "cadis", "dynafed", "fedaf", "fedavg", "feddm", "fedhead", "fedhkd", "fedlgd"),
    *("fedmd", "fedproto", "fedseq", "fedseq-zaccone", "hfldd", "vhl"),
)
RUNS = settings(
    FUZZ,
    max_examples=max(10, FUZZ.max_examples // 10),  # each has some fifty replies
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # too slow to shrink
    report_multiple_bugs=False,
)


@RUNS
@given(
    st.sampled_from(METHODS),
    st.sets(st.integers(0, NODES - 1), min_size=1, max_size=2),
    st.sampled_from(["relay", "auto"]),
    st.booleans(),
    st.data(),
)
def test_a_run_with_hostile_nodes_learns_a_finite_model_or_says_why_not(
    tmp_path_factory, name, hostile, links, defended, data
):
    def attack(message, node):
        content = node(message)
        turn = data.draw(st.sampled_from(["honest", "rewritten", "rewritten", "any", "error"]))
        match turn:
            case "honest":
                return content
            case "any":
                return data.draw(replies)
            case "error":
                return data.draw(errors)
        return data.draw(rewritten(content))

    folder = tmp_path_factory.mktemp("run")
    answers = [attack if place in hostile else honest for place in range(NODES)]
    strategy, grid, start, models, lines = play(name, answers, folder, links, defended)
    for model in models:
        arrays = as_arrays(model)
        assert list(arrays) == list(start)
        for key, array in arrays.items():
            assert array.shape == start[key].shape
            if start[key].dtype.kind == "f":  # Flower's strategies make counts floats
                assert array.dtype == start[key].dtype
            assert np.isfinite(array).all()
            assert not key.endswith("running_var") or (array >= 0).all()
    assert finite(state_of(strategy))
    assert all(line.isprintable() and len(line) <= LONGEST_LINE for line in lines)
    for line in (folder / "journal.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda constant: 1 / 0)
    assert all(0 <= size < MOST_BYTES for size in grid.ledger.entries.values())
    assert all(count <= 100 for count in grid.transport.failures.journal._set_aside.values())


def test_honest_runs_learn_and_nobody_is_set_aside(tmp_path):
    for name in METHODS_TO_LEARN:
        folder = tmp_path / name
        folder.mkdir()
        _, grid, _, models, lines = play(name, [honest] * NODES, folder)
        own = all_methods()[name].outcome == "personal"
        assert (name, len(models), lines) == (name, 0 if own else 1, [])
        assert sum(grid.transport.failures.journal._set_aside.values()) == 0
