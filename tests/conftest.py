"""A Flower Grid in memory, whose nodes are functions; stands in for a SuperLink in fast tests."""

import ast
import contextlib
import gc
import importlib.metadata
import logging
import random
import sys
from itertools import count

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from benchmarks.in_process import FIRST_NODE, InProcessGrid
from benchmarks.virtual_device import VirtualDevice, unsupported
from flwr_distill.client.app import app
from flwr_distill.flower.lines import FOLDERS, line
from flwr_distill.flower.task_identity import identify
from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.record.recorder import Recorder
from flwr_distill.task.plugin import installed_plugins

OF_A_LINE = "flwr_distill.flower.line_"

identify(1, 1, 1)  # tests make messages of no task
torch.set_num_threads(1)  # tests and the processes they start share few cores
with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may have no Hypothesis
    from hypothesis import settings

    settings.register_profile("shared cores", deadline=None)  # an example may have to wait
    settings.load_profile("shared cores")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: PyTorch finds none on this machine")


def pytest_collection_modifyitems(items):
    """Slow files first, so that quick ones fill the workers' last minutes.

    Notes the row of the table in docs/flower.md that a test is about.
    """
    slow = {i.path for i in items if i.get_closest_marker("slow") or i.get_closest_marker("faults")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        for mark in item.iter_markers("deployment"):
            item.user_properties.append(("deployment", mark.args[0]))


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_other_files():
    """Flower collects garbage for arrays that it reads: do not look at what stays anyway."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path):
    """Tests of what serves one line of Flower need that line's modules."""
    if collection_path.suffix != ".py":
        return None
    source = collection_path.read_bytes()
    if OF_A_LINE.encode() not in source:  # nearly all: parsing them takes seconds
        return None
    statements = ast.parse(source).body
    imported = [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    folders = {name.split(".")[2] for name in imported if name.startswith(OF_A_LINE)}
    return True if folders - {FOLDERS.get(line())} else None


class MemoryGrid(InProcessGrid):
    """Keeps what was sent in `pushed`, and takes nodes that never answer: these return None.

    Replies are there one a poll, the last first where ``reverse`` is set.
    """

    def __init__(self, nodes):
        super().__init__(nodes)
        self.pushed = []
        self.reverse = False

    def push_messages(self, messages):
        messages = list(messages)
        self.pushed += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        ready = [i for i in message_ids if i in self.replies]
        return super().pull_messages(ready[-1:] if self.reverse else ready[:1])

    def send_and_receive(self, messages, *, timeout=None):
        return super().pull_messages(self.push_messages(messages))


@pytest.fixture(autouse=True)
def same_draws_every_time():
    """No test fails by chance: some draw without a generator, as Flower does for its noise."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - Flower draws from it
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Leave out pictures in a run's folder, a third of a small run's time, but where marked."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr(Recorder, "_save_picture", lambda *picture: None)


@pytest.fixture
def flower_log(caplog, monkeypatch):
    """Warnings of Flower's logger."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture
def virtual_device():
    """`VirtualDevice`, for tests that need one; they skip where this PyTorch cannot have it."""
    if reason := unsupported():
        pytest.skip(reason)
    return VirtualDevice


@pytest.fixture
def memory_grid():
    return MemoryGrid


@pytest.fixture
def little_distillation():
    """Settings with which any strategy that distils does so at once, and none draws noise."""
    return {
        "dp-fixed.noise-multiplier": 0.0,
        "dp-adaptive.noise-multiplier": 0.0,
        "dp-adaptive.clipped-count-stddev": 0.0,
        "hfldd.distiller": "dm",
        "hfldd.distill-steps": 2,
        "hfldd.distilled-size": 4,
        "fedhead.distill-epochs": 2,
        "fedhead.least-classes": 0.0,
        "fedhead.least-gain": 0.0,
        "fedhead.server-epochs": 2,
        "fedhead.reference-size": 16,
        "fedhkd.noise": 0.0,
        "fedmd.auxiliary-size": 16,
        "fedmd.pretrain-epochs": 1,
        "fedmd.private-epochs": 1,
        "fedlgd.first-steps": 2,
        "fedlgd.refine-steps": 2,
        "fedlgd.global-steps": 2,
        "dynafed.trajectory": 1,
        "dynafed.per-class": 1,
        "dynafed.distill-steps": 2,
        "dynafed.follow-steps": 2,
        "fedaf.per-class": 2,
        "fedaf.distill-steps": 2,
        "fedaf.server-epochs": 2,
        "feddm.per-class": 2,
        "feddm.distill-steps": 2,
        "feddm.server-epochs": 2,
        "fedseq.cluster-size": 2,
        "fedseq-zaccone.pretraining-epochs": 1,
        "fedseq-zaccone.auxiliary-size": 16,
        "fedseq-zaccone.most-nodes": 2,
        "vhl.per-class": 2,
        "vhl.virtual-batch": 8,
    }


@pytest.fixture
def client_grid(tmp_path):
    """Grid of nodes that run our real ClientApp in this process, on partitions of a dataset."""
    run_ids = count(1)

    def grid_of(
        num_nodes,
        run_config,
        broken=lambda node, message: False,
        node_config=None,
        first_node=FIRST_NODE,
        step=1,
    ):
        run_id = next(run_ids)

        def node(index):
            context = Context(
                run_id=run_id,
                node_id=first_node + step * index,
                node_config={
                    "partition-id": index,
                    "num-partitions": num_nodes,
                    "state-dir": str(tmp_path / "state"),
                    "device": "cpu",
                    **(node_config or {}),
                },
                state=RecordDict(),
                run_config=run_config,
            )

            def answer(message):
                if broken(index, message):
                    raise RuntimeError("this node is broken")
                return app(message, context).content

            return answer

        return MemoryGrid({first_node + step * i: node(i) for i in range(num_nodes)})

    return grid_of


def forget_packages():
    """Read again which packages are installed."""
    installed_plugins.cache_clear()
    all_methods.cache_clear()


@pytest.fixture
def on_path(monkeypatch):
    """Puts a folder with installed packages on this process's path, as long as the test lasts."""
    folders = []

    def put(site):
        folders.append(str(site))
        monkeypatch.syspath_prepend(site)
        forget_packages()
        return site

    yield put
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders) or "\0"):
            del sys.modules[name]
    monkeypatch.undo()
    forget_packages()


@pytest.fixture
def install(tmp_path, on_path):
    """Install a package of one module, with entry points to its parts by name."""

    def write(module, source, name="someones", version="1.0", hooks=(), readers=(), **methods):
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, points in (("methods", methods), ("hooks", hooks), ("readers", readers)):
            lines += [f"[flwr_distill.{group}]"]
            lines += [f"{key.replace('_', '-')} = {path}" for key, path in dict(points).items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        on_path(site)
        assert importlib.metadata.version(name) == version
        return site

    return write


@pytest.fixture
def finished_run(tmp_path):
    """Write the folder of a run as the ServerApp does, without training: three nodes, one fails."""
    from flwr.app import ArrayRecord, MetricRecord

    from flwr_distill.server.hooks import Hooks, RoundEnd, RunEnd, RunStart
    from flwr_distill.server.record.about import about_run, class_counts
    from flwr_distill.server.record.history import History
    from flwr_distill.server.record.hooks import hooks_of_run
    from flwr_distill.server.record.journal import Journal
    from flwr_distill.server.record.recorder import write_json
    from flwr_distill.server.roster import Roster
    from flwr_distill.server.settings import RunSettings
    from flwr_distill.strategies.common.directory import Description
    from flwr_distill.task.models import create_model
    from flwr_distill.task.source import data_spec, partition_samples
    from tests.grids import plain_grid

    nodes = [FIRST_NODE + i for i in range(3)]
    topology = {
        "clusters": [{"head": "node-0", "members": ["node-2"]}, {"head": "node-1", "members": []}]
    }

    def numbers(message):
        content = {"num-examples": 400, "train-loss": 2.0, "eval-accuracy": 0.5}
        return RecordDict({"metrics": MetricRecord(content)})

    def fails(message):
        raise RuntimeError("out of <memory>")

    def write(name="101", accuracies=(0.1, 0.5, 0.9), artifacts=None, **run_config):
        config = {key.replace("__", ".").replace("_", "-"): v for key, v in run_config.items()}
        settings = RunSettings.from_run_config(
            {"strategy": "fedhead", "num-rounds": len(accuracies) - 1, **config}
        )
        spec, folder = data_spec(settings), tmp_path / "runs" / name
        arrays = ArrayRecord(create_model(settings.model, spec, seed=0).state_dict())
        names = {node: f"node-{i}" for i, node in enumerate(nodes)}
        held = [len(partition_samples(settings, i, 3)) for i in range(3)]
        trained_on = [n - int(settings.train.holdout * n) for n in held]
        roster = Roster(
            nodes={
                node: Description(n, partition=i)
                for i, (node, n) in enumerate(zip(nodes, trained_on, strict=True))
            }
        )
        roster.directory.names |= names
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(Journal(folder / "journal.jsonl"))
            inner = MemoryGrid({nodes[0]: numbers, nodes[1]: numbers, nodes[2]: fails})
            grid = plain_grid(inner, deadline=5, journal=journal)
            history = History(grid.ledger, journal)
            own = stack.enter_context(hooks_of_run(folder, settings, history))
            hooks = Hooks(journal, *own)
            hooks.on_run_start(RunStart(1, folder, settings.model_dump(by_alias=True), names, ()))
            write_json(folder / "about.json", about_run(spec, roster, history.started))

            def end_round(number):
                accuracy = accuracies[number]
                metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
                metrics["class-accuracy"] = [accuracy, float("nan")]
                clusters = {**topology, "groups": []}
                row = history.end_round(number, MetricRecord(metrics), clusters)
                hooks.on_round_end(RoundEnd(row, arrays, clusters))

            end_round(0)
            for number in range(1, len(accuracies)):
                record = RecordDict({"arrays": arrays})
                grid.send_and_receive([Message(record, node, "train") for node in nodes])
                topology["clusters"][0].update(head="node-2" if number % 2 else "node-0")
                end_round(number)
        counts = class_counts(settings, spec, roster)
        formulas = {"fedavg (HFLDD, eq. 3)": 1e6}
        hooks.on_run_end(RunEnd(arrays, formulas, artifacts or {}, (), counts))
        return folder

    return write
