"""CADIS, FedLGD and the baselines on virtual nodes, in Flower's simulation runtime (Ray)."""

import json
import subprocess
import tempfile
import time
from contextlib import contextmanager
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


@contextmanager
def simulating(home, node_settings, **more):
    """A SuperLink that simulates; yields what runs an app on it, and gives the output and home."""
    control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(2))
    write_connection(home, "sim", control)
    # docs/flower.md: otherwise Ray's children die now and then
    env = {**environment(home), "GRPC_ENABLE_FORK_SUPPORT": "0", **more}
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
                *("--federation-config", node_settings, "--run-config", text),
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
def flwr_run(tmp_path_factory):
    """Runs an app, with some settings, on a SuperLink that simulates; gives the output and home."""
    settings = f"num-supernodes={NODES} client-resources-num-cpus=1 init-args-num-cpus=1"
    with simulating(tmp_path_factory.mktemp("flower"), settings) as run:
        yield run


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


@pytest.mark.matrix
def test_cadis_puts_every_virtual_node_into_a_cluster(simulation):
    folder = simulation("cadis", **{"partition.scheme": "cluster-mc", "partition.clusters": "3:1"})
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    members = [n for cluster in read(folder, "topology")["clusters"] for n in cluster["members"]]
    assert sorted(members) == ["node-0", "node-1", "node-2", "node-3"]


@pytest.mark.matrix
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


@contextmanager
def ray_machine(folder, *words):
    """A machine of a Ray cluster with one core, whose nodes keep their state in the folder."""
    command = ["ray", "start", "--block", "--num-cpus", "1", "--num-gpus", "0", *words]
    options = ("--node-ip-address", "127.0.0.1", "--disable-usage-stats")
    env = {**environment(folder), "FLWR_DISTILL_STATE": str(folder / "state")}
    log = folder / "ray.log"
    process = start_bound([*command, *options], log=log, env=env, cwd=folder)
    try:
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        stop([process])


@pytest.fixture
def two_machines(tmp_path):
    """The address of a Ray cluster of two machines, and the folder of each."""
    head, other = tmp_path / "head", tmp_path / "other"
    (port,) = free_ports(1)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short,  # Ray has sockets in it
        ray_machine(head, "--head", "--port", str(port), "--temp-dir", short),
        ray_machine(other, "--address", f"127.0.0.1:{port}"),
    ):
        yield f"127.0.0.1:{port}", [head, other]


@pytest.mark.slow
def test_virtual_nodes_train_on_all_machines_of_a_ray_cluster(two_machines, tmp_path):
    address, machines = two_machines
    home = tmp_path / "flower"
    home.mkdir()
    settings = {"strategy": "fedavg", "num-rounds": 2, "train.local-epochs": 1}
    config = {**settings, "min-nodes": NODES, "runs-dir": str(tmp_path / "runs")}
    node_settings = f"num-supernodes={NODES} client-resources-num-cpus=1"
    with simulating(home, node_settings, RAY_ADDRESS=address) as run:
        output, _ = run(ROOT, **config)
    (*folders,) = (tmp_path / "runs").glob("[0-9]*")
    assert folders, output
    assert [row["round"] for row in rows(folders[0])] == [0, 1, 2], output
    assert all(list(machine.glob("state/runs/*/*")) for machine in machines)
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    same = run_in_process(settings, nodes)
    assert rows(folders[0])[-1]["loss"] == pytest.approx(same[-1]["loss"], abs=1e-5)
