"""Our app on a federation of real processes: SuperLink, nodes, gRPC."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.storage.store import NodeStore
from tests.environments import PROGRAM
from tests.matrix import BASELINES

from .one_place import MODEL, SPLITS, head_of_all, split
from .runs import command, complete, phases, read, rows, submit, with_dots

NODES, SECTORS = 3, 1

PACKAGE = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "someones-strategies"
version = "1.0"
[tool.setuptools]
py-modules = ["someones_strategies"]
[project.entry-points."flwr_distill.methods"]
decay = "someones_strategies:Decay"
""",
    "someones_strategies.py": '''
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Result


class Decay(FedAvg):
    """FedAvg whose learning rate falls by a tenth each round; node trouble in round 1."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.05 * 0.9 ** (server_round - 1)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if server_round == 1:  # one node gets a setting that it must refuse
            content = messages[0].content.copy()
            content["config"] = type(config)({**config, "lr": -1.0})
            messages[0].content = content
        return messages


class OwnLoop(FedAvg):
    """A loop of its own, which evaluates by itself and ends a round early."""

    def start(self, grid, initial_arrays, num_rounds, timeout, train_config, **_):
        result = Result(arrays=initial_arrays)
        for number in range(1, num_rounds):
            messages = self.configure_train(number, result.arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            result.arrays, _ = self.aggregate_train(number, replies)
            result.evaluate_metrics_serverapp[number] = MetricRecord({"size": len(result.arrays)})
        return result


class OwnEvaluation(FedAvg):
    """Flower's loop, with an evaluation in place of the ServerApp's."""

    def start(self, *args, **kwargs):
        evaluate = lambda number, arrays: MetricRecord({"size": len(arrays)})
        return super().start(*args, **{**kwargs, "evaluate_fn": evaluate})
''',
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three real nodes, and another package with a strategy installed beside ours."""
    folder = tmp_path_factory.mktemp("federation")
    package, site = folder / "package", folder / "site"
    package.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    install = ("uv", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [*install, "--python", sys.executable, "--target", str(site), str(package)],
        check=True,
        env={**os.environ, "PATH": path},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        with LocalFederation(NODES, folder / "state", direct_links=True) as running:
            running.folder = folder
            yield running


def run(federation, **settings):
    """The outcome and the folder of a run with two rounds."""
    config = {"num-rounds": 2, **with_dots(settings)}
    return submit(federation, federation.folder / "runs", config)


def completed(federation, **settings):
    config = {"num-rounds": 2, **with_dots(settings)}
    return complete(federation, federation.folder / "runs", config)


@pytest.fixture(scope="module")
def hfldd(federation):
    """The outcome and the folder of a run of HFLDD."""
    return run(federation, strategy="hfldd", hfldd__distill_steps=5)


@pytest.mark.slow
def test_hfldd_runs_on_real_processes_and_leaves_its_results(hfldd):
    outcome, folder = hfldd
    assert outcome.completed, outcome.lines[-20:]
    assert sum("round " in line and "accuracy" in line for line in outcome.lines) >= 3
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    assert read(folder, "summary")["link_bytes"] > 0
    clusters = read(folder, "topology")["clusters"]
    named = [n for c in clusters for n in (c["head"], *c["members"])]
    assert sorted(named) == ["node-0", "node-1", "node-2"]


@pytest.mark.slow
def test_rounds_end_with_some_replies_and_late_ones_count_later(federation):
    folder = completed(federation, strategy="fedavg", buffer=1, num_rounds=6, train__local_epochs=3)
    assert [row["round"] for row in rows(folder)] == list(range(7))
    assert rows(folder)[-1]["accuracy"] > rows(folder)[0]["accuracy"]
    trained = phases(folder, "train")
    assert trained[0]["asked"] == NODES
    assert sum(phase["asked"] for phase in trained) < 6 * NODES
    assert {node for phase in trained for node in phase["nodes"]} == {
        node for phase in phases(folder, "query.describe") for node in phase["nodes"]
    }


@pytest.mark.slow
def test_a_runs_model_is_evaluated_on_every_node_by_one_command(federation, hfldd, tmp_path):
    where = ("--state-dir", federation.state_dir, "-c", f'runs-dir="{tmp_path}"')
    shown = command("evaluate", hfldd[1], *where)
    (folder,) = tmp_path.iterdir()
    (evaluation,) = phases(folder, "evaluate")
    assert len(evaluation["nodes"]) == NODES
    assert not phases(folder, "train")
    assert all(f"node-{place} " in shown for place in range(NODES))
    assert "Worst is node-" in shown
    assert f"Report: {folder / 'report.html'}" in shown
    assert rows(folder)[0]["accuracy"] == rows(hfldd[1])[-1]["accuracy"]


@pytest.mark.deployment("consecutive runs, equal to the last bit")
@pytest.mark.slow
def test_two_real_runs_with_one_seed_give_the_same_model_to_the_last_bit(federation, hfldd):
    again = completed(federation, strategy="hfldd", hfldd__distill_steps=5)
    models = [(folder / "model.safetensors").read_bytes() for folder in (hfldd[1], again)]
    assert len({hashlib.sha256(model).hexdigest() for model in models}) == 1


@pytest.fixture(scope="module")
def fedhead(federation):
    """The folder of a round of FedHEAD over direct links."""
    names = {f"fedhead__{name}": 0.0 for name in ("least_classes", "least_gain")}
    return completed(
        federation,
        **{"strategy": "fedhead", "links": "direct", "num_rounds": 1, "train__local_epochs": 1},
        **{"fedhead__sectors": SECTORS, "fedhead__distill_epochs": 1, **names},
    )


@pytest.mark.slow
def test_a_round_of_fedhead_leaves_its_leaders(fedhead):
    topology = read(fedhead, "topology")
    assert topology["heads"] == {"1": [cluster["head"] for cluster in topology["clusters"]]}
    assert len(topology["clusters"]) == SECTORS
    assert (fedhead / "topology.png").exists()


@pytest.mark.slow
def test_models_pass_the_server_to_and_from_leaders_only(fedhead):
    traffic = read(fedhead, "traffic")
    model = sum(array.nbytes for array in load_file(fedhead / "model.safetensors").values())
    by_phase = {
        (phase, link): size
        for phase, links in traffic["payloads"].items()
        for link, size in links.items()
        if size
    }
    assert by_phase == {
        ("train.hand_out", "server->node"): pytest.approx(SECTORS * model, rel=0.03),
        ("train.aggregate_sector", "node->server"): pytest.approx(SECTORS * model, rel=0.03),
        ("train.distill_sector", "server->node"): pytest.approx(SECTORS * model, rel=0.03),
        ("train.distill_sector", "node->server"): pytest.approx(SECTORS * model, rel=0.03),
    }
    transfers = 2 * (NODES - SECTORS)  # w to the members, what they trained to their leaders
    direct = sum(links.get("member->head, direct", 0) for links in traffic["measured"].values())
    assert direct == pytest.approx(transfers * model, rel=0.03)
    assert not any("member->head, relayed" in links for links in traffic["measured"].values())


@pytest.mark.slow
def test_fedlgd_ends_with_virtual_data_on_server_and_nodes_and_every_nodes_accuracy(federation):
    steps = {f"fedlgd__{name}_steps": 5 for name in ("first", "refine", "global")}
    iid = {"partition__scheme": "iid", "train__local_epochs": 1, "fraction_evaluate": 1.0}
    folder = completed(federation, strategy="fedlgd", num_rounds=3, fedlgd__every=2, **steps, **iid)
    assert all(0 <= row["node_accuracy"] <= 1 for row in rows(folder)[1:])
    virtual = VirtualData.from_safetensors((folder / "virtual.safetensors").read_bytes())
    assert virtual.labels.bincount().tolist() == [10] * 10
    assert virtual.steps == 2 * 5
    for node in federation.nodes:
        (store,) = node.state_dir.glob(f"runs/{folder.name}/*")
        assert NodeStore(store).read("virtual-data")
        assert NodeStore(store).read("global-virtual-data")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "links"),
    [
        pytest.param("fedseq", "direct", marks=pytest.mark.deployment("resume")),
        *((name, "relay") for name in BASELINES),
    ],
)
def test_a_resumed_run_on_real_processes_learns_what_a_whole_one_in_one_process_does(
    federation, little_distillation, strategy, links
):
    config = {
        **little_distillation,
        **{"strategy": strategy, "links": links, "num-rounds": 2, "fraction-evaluate": 1.0},
        **{"min-nodes": NODES, "train.local-epochs": 1, "train.batch-size": 64},
    }
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    whole = run_in_process(config | {"links": "relay"}, nodes)
    runs = federation.folder / "runs"
    folder = complete(federation, runs, config | {"num-rounds": 1})
    complete(federation, runs, config | {"resume": folder.name})
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    for row, same in zip(rows(folder), whole, strict=True):
        for measure in ("accuracy", "loss", "node_accuracy"):
            assert row[measure] == pytest.approx(same[measure], abs=1e-5)
    if strategy.startswith("fedseq"):  # the others send nothing from node to node
        assert rows(folder)[-1]["link_bytes"] > 0


@pytest.mark.slow
def test_a_resumed_run_over_coded_links_learns_what_a_whole_one_in_one_process_does(federation):
    config = {
        **{"strategy": "fedavg", "num-rounds": 4, "fraction-evaluate": 1.0, "min-nodes": NODES},
        **{"down-codec": "delta-int4", "up-codec": "topk", "train.batch-size": 64},
    }
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    whole, runs = run_in_process(config, nodes), federation.folder / "runs"
    folder = complete(federation, runs, config | {"num-rounds": 2})
    complete(federation, runs, config | {"resume": folder.name})
    for row, same in zip(rows(folder), whole, strict=True):
        for measure in ("accuracy", "loss", "node_accuracy"):
            assert row[measure] == pytest.approx(same[measure], abs=1e-5)
    assert rows(folder)[2]["server_bytes"] == pytest.approx(whole[2]["server_bytes"], rel=0.02)


@pytest.mark.slow
def test_coded_models_from_node_to_node_give_what_they_give_in_one_process(
    federation, little_distillation
):
    config = {
        **little_distillation,
        **{"strategy": "fedhead", "links": "direct", "num-rounds": 2, "min-nodes": NODES},
        **{"train.local-epochs": 1, "fedhead.least-gain": 0.0, "fedhead.sectors": SECTORS},
        **{"down-codec": "float16", "up-codec": "int8"},
    }
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    whole, runs = run_in_process(config | {"links": "relay"}, nodes), federation.folder / "runs"
    folder = complete(federation, runs, config | {"num-rounds": 1})
    complete(federation, runs, config | {"resume": folder.name})
    for row, same in zip(rows(folder), whole, strict=True):
        for measure in ("accuracy", "loss"):
            assert row[measure] == pytest.approx(same[measure], abs=1e-5)
    traffic = read(folder, "traffic")
    direct = sum(links.get("member->head, direct", 0) for links in traffic["measured"].values())
    model = sum(array.nbytes for array in load_file(folder / "model.safetensors").values())
    assert 0 < direct < 2 * (NODES - SECTORS) * 0.75 * model


@pytest.mark.slow
def test_a_strategy_of_another_package_runs_by_name_and_a_failing_node_does_not_end_it(federation):
    outcome, folder = run(federation, strategy="decay", num_rounds=3)
    assert outcome.completed, outcome.lines[-20:]
    assert any("Received 2 results and 1 failures" in line for line in outcome.lines)
    assert any("Received 3 results and 0 failures" in line for line in outcome.lines)
    assert any("message: lr = -1.0: should be greater than 0" in line for line in outcome.lines)
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OwnLoop", "OwnEvaluation"])
def test_a_strategy_with_a_loop_or_evaluation_of_its_own_leaves_report_and_export(
    federation, name, tmp_path
):
    folder = completed(federation, strategy=f"someones_strategies:{name}", num_rounds=3)
    rounds = [row["round"] for row in rows(folder)]
    assert rounds == [0, 1, 2, 3][: 3 + (name == "OwnEvaluation")]
    assert rows(folder)[-1]["accuracy"] > rows(folder)[0]["accuracy"]
    assert (folder / "report.html").exists()
    command("runs", "export", folder, "--format", "onnx", "--output", tmp_path)
    assert (tmp_path / "model.onnx").exists()


def head_of_run(federation, config):
    shared = {"strategy": "analytic", "num-rounds": 1}
    folder = complete(federation, federation.folder / "runs", shared | config)
    return load_file(folder / "model.safetensors")["head.weight"]


IN_CI = "one class a node"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == IN_CI else pytest.mark.matrix)
        for name in SPLITS
    ],
)
def test_one_round_of_sums_gives_the_head_of_all_samples_in_one_place(federation, tmp_path, name):
    config = split(name, NODES, tmp_path)
    weight = head_of_run(federation, config)
    head = head_of_all(config, NODES, tmp_path)
    np.testing.assert_allclose(weight, head.weight, atol=1e-5, rtol=0)


@pytest.mark.deployment("a killed node comes back for the next run")
@pytest.mark.matrix
def test_nodes_that_are_killed_and_started_again_give_the_same_head(federation):
    config = {**MODEL, "partition.classes": 3}
    before = head_of_run(federation, config)
    federation.nodes[1].kill()
    assert federation.restart_dead_nodes() == [federation.nodes[1]]
    federation.wait_for_nodes(timeout=120)
    np.testing.assert_allclose(head_of_run(federation, config), before, atol=1e-5, rtol=0)


@pytest.mark.matrix
def test_virtual_features_and_heads_are_all_that_travels_where_a_frozen_networks_head_trains(
    federation,
):
    folder = completed(
        federation,
        **{"strategy": "hfldd", "model": "random-features", "start": "analytic"},
        hfldd__auxiliary_size=20,
        hfldd__distilled_size=8,  # two of each of a node's four classes
    )
    last = rows(folder)[-1]
    assert last["accuracy"] > 0.9
    distilled = [entry["nodes"] for entry in phases(folder, "train.distill")]
    sizes = [numbers["num-values"] for nodes in distilled for numbers in nodes.values()]
    assert set(sizes) == {8 * 1024}
    assert last["link_bytes"] / len(sizes) < 8 * 1024 / 2 + 2500  # 4 bits a number, header and seal
    whole = sum(weight.size * 4 for weight in load_file(folder / "model.safetensors").values())
    assert read(folder, "traffic")["measured"]["train.pool"]["server->node"] < whole  # two rounds
    assert whole > 4 * 1024 * 64


@pytest.mark.slow
def test_a_wrong_setting_fails_the_run_with_the_reason_in_its_log(federation):
    outcome, folder = run(federation, strategy="hfldd", hfldd__groups=40)
    assert outcome.status == "finished:failed"
    assert any("hfldd.groups = 40: there are 3 nodes" in line for line in outcome.lines)
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_with_an_unwritable_runs_dir_ends_with_one_line(federation, tmp_path):
    runs = tmp_path / "runs"
    runs.write_text("a file, since root may write to any folder")
    settings = f'strategy="fedavg" num-rounds=1 runs-dir="{runs}"'
    where = ("--state-dir", str(federation.state_dir))
    ended = subprocess.run(
        [*PROGRAM, "run", "-c", settings, *where], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert str(runs) in line
    assert "runs-dir" in line
    assert "Traceback" not in ended.stdout
