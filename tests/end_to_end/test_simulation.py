"""CADIS, FedLGD and the baselines on virtual nodes, in Flower's simulation runtime (Ray)."""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.fleet.servers import environment, write_connection
from flwr_distill.flower.line_1_32.fleet.superlink import Control
from flwr_distill.node.processes import start_bound, stop
from tests.matrix import BASELINES

from .one_place import SPLITS, head_of_all, split
from .runs import ROOT, read, rows

pytestmark = pytest.mark.timeout(600)  # Ray starts slowly on a busy machine

pytest.importorskip("ray", reason="Flower's simulation runtime needs ray: flwr[simulation]")

NODES = 4
NODE_SETTINGS = f"num-supernodes={NODES} client-resources-num-cpus=1 init-args-num-cpus=1"


@pytest.fixture(scope="module")
def flwr_run(tmp_path_factory):
    """Runs an app, with some settings, on a SuperLink that simulates; gives the output and home."""
    home = tmp_path_factory.mktemp("flower")
    control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(2))
    write_connection(home, "sim", control)
    # docs/flower.md: otherwise Ray's children die now and then
    env = {**environment(home), "GRPC_ENABLE_FORK_SUPPORT": "0"}
    command = [
        *("flower-superlink", "--insecure", "--simulation"),
        "--disable-runtime-dependency-installation",
        *("--control-api-address", control, "--serverappio-api-address", serverappio),
    ]
    superlink = start_bound(command, log=home / "superlink.log", env=env, cwd=home)

    def run(app, **values):
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        ended = subprocess.run(
            [
                *("flwr", "run", str(app), "sim", "--stream"),
                *("--federation-config", NODE_SETTINGS, "--run-config", text),
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=570,
        )
        return ended.stdout[-4000:] + ended.stderr[-2000:], home

    try:
        with Control(control) as link:
            link.wait(60, is_up=lambda: superlink.poll() is None)
        yield run
    finally:
        stop([superlink])


@pytest.fixture(scope="module")
def simulation(flwr_run, tmp_path_factory):
    """Runs our app with a strategy; gives the run's folder."""
    runs = tmp_path_factory.mktemp("runs")

    def run(strategy, **settings):
        folder = Path(tempfile.mkdtemp(dir=runs, prefix=strategy))
        values = {
            "strategy": strategy,
            "num-rounds": 2,
            "min-nodes": NODES,
            "runs-dir": str(folder),
            **settings,
        }
        output, _ = flwr_run(ROOT, **values)
        finished = list(folder.glob("*/summary.json"))
        assert finished, output
        return finished[0].parent

    return run


@pytest.mark.slow
def test_cadis_puts_every_virtual_node_into_a_cluster(simulation):
    folder = simulation("cadis", **{"partition.scheme": "cluster-mc", "partition.clusters": "3:1"})
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    members = [n for cluster in read(folder, "topology")["clusters"] for n in cluster["members"]]
    assert sorted(members) == ["node-0", "node-1", "node-2", "node-3"]


@pytest.mark.slow
def test_fedlgd_distils_on_virtual_nodes_and_on_the_server(simulation):
    steps = {f"fedlgd.{name}-steps": 5 for name in ("first", "refine", "global")}
    folder = simulation("fedlgd", **{"partition.scheme": "iid", "fedlgd.every": 1, **steps})
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    virtual = VirtualData.from_safetensors((folder / "virtual.safetensors").read_bytes())
    assert (virtual.labels.bincount().tolist(), virtual.steps) == ([10] * 10, 2 * 5)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SPLITS)
def test_one_round_of_sums_of_virtual_nodes_gives_the_head_of_all_samples(
    simulation, tmp_path, name
):
    config = split(name, NODES, tmp_path)
    weights = load_file(simulation("analytic", **config, **{"num-rounds": 1}) / "model.safetensors")
    head = head_of_all(config, NODES, tmp_path)
    np.testing.assert_allclose(weights["head.weight"], head.weight, atol=1e-5, rtol=0)
    np.testing.assert_allclose(weights["head.bias"], head.bias, atol=1e-5, rtol=0)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", BASELINES)
def test_baselines_learn_on_virtual_nodes_what_they_do_in_one_process(
    simulation, little_distillation, strategy
):
    settings = {**little_distillation, "train.local-epochs": 1, "fraction-evaluate": 1.0}
    found = rows(simulation(strategy, **settings))
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    same = run_in_process({**settings, "strategy": strategy, "num-rounds": 2}, nodes)
    for measure in ("round", "accuracy", "loss", "node_accuracy"):
        expected = [pytest.approx(row[measure], abs=1e-5) for row in same]
        assert [row[measure] for row in found] == expected


@pytest.mark.slow
def test_an_app_of_ones_own_with_our_handlers_runs_on_virtual_nodes(flwr_run):
    output, home = flwr_run(ROOT / "examples" / "own-app", **{"num-server-rounds": 2})
    assert (home / "final_model.pt").is_file(), output
