"""`docker compose up` for real: it ends with a table, survives its parts, and leaves nothing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "flwr-distill-test"


COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
PINNED = COMPOSE["x-hardened"]["build"]["args"]["PYTHON_IMAGE"].partition(":-")[2].rstrip("}")
# Where no registry is reached, the same base image goes by its tag alone.
BASES = (PINNED, PINNED.partition("@")[0])


def succeeds(*arguments):
    requests = subprocess.run(["docker", *arguments], capture_output=True, check=False)
    return requests.returncode == 0


def has_engine():
    return shutil.which("docker") is not None and succeeds("info")


def base_image():
    for image in BASES:
        if succeeds("image", "inspect", image) or succeeds("pull", "--quiet", image):
            return image
    pytest.skip(f"{PINNED} is neither here nor to be had")


pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine runs here"),
]


KILL_SERVERAPP = """
import os
import signal
from pathlib import Path

folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
words = {int(folder.name): (folder / "cmdline").read_bytes().split(bytes(1)) for folder in folders}
ours = [process for process, command in words.items() if b"flwr_distill.fleet.serverapp" in command]
os.kill(max(ours), signal.SIGKILL)
"""
"""Kills the ServerApp, the child of the process that waits for it."""


class Composed:
    """The project, in a copy of the tree that has nothing but what is in the repository."""

    def __init__(self, tree, base):
        self.tree = tree
        self.environment = os.environ | {"PYTHON_IMAGE": base}

    def compose(self, *arguments, **settings):
        return subprocess.run(
            ["docker", "compose", "--project-name", PROJECT, *arguments],
            cwd=self.tree,
            env=self.environment | settings,
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, **settings):
        """Submit a run and continue at once."""
        return subprocess.Popen(
            ["docker", "compose", "--project-name", PROJECT, "run", "--rm", "-T", "run"],
            cwd=self.tree,
            env=self.environment | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def container(self, service):
        labels = (("project", PROJECT), ("service", service), ("oneoff", "False"))
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels]
        return docker("ps", "--all", "--quiet", *filters)

    def inspect(self, service, what):
        return docker("inspect", "--format", "{{" + what + "}}", self.container(service))

    def wait_for_health(self, service, seconds):
        deadline = time.monotonic() + seconds
        while self.inspect(service, ".State.Health.Status") != "healthy":
            assert time.monotonic() < deadline, docker("logs", self.container(service))
            time.sleep(1)


def docker(*arguments):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def left(kind):
    of_ours = f"--filter=label=com.docker.compose.project={PROJECT}"
    return docker(*kind, "--quiet", of_ours).split()


def read_until(process, wanted):
    """Lines of a process up to the first with `wanted`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted in line:
            return
    raise AssertionError("".join(lines[-40:]))


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    tree = tmp_path_factory.mktemp("clone") / "flwr-distill"
    skipped = shutil.ignore_patterns(".*cache", ".venv", ".git", ".hypothesis", "runs", "state")
    shutil.copytree(ROOT, tree, ignore=skipped)
    composed = Composed(tree, base_image())
    composed.compose("down", "--volumes")
    done = composed.compose("up", "--build", "--detach")
    try:
        assert done.returncode == 0, done.stderr
        yield composed
    finally:
        done = composed.compose("down", "--volumes")
    assert done.returncode == 0, done.stderr
    assert [left(kind) for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls"))] == [
        []
    ] * 3


def test_up_ends_with_the_table_and_leaves_the_results(up):
    assert docker("wait", up.container("run")) == "0"
    log = up.compose("logs", "run").stdout
    assert "strategy" in log
    assert "hfldd" in log.splitlines()[-3]
    (summary,) = up.tree.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["accuracy"] > 0.6


def test_the_dashboard_shows_nodes_and_run_on_loopback_and_neither_reaches_it(up):
    up.wait_for_health("dashboard", 60)
    with urllib.request.urlopen("http://127.0.0.1:8080/", timeout=30) as answer:
        page = answer.read().decode()
    for words in ("4 of 4 online", "node-3", "hfldd on digits", "completed"):
        assert words in page, page
    for service in ("node-0", "serverapp"):
        assert reached(up, service, ["dashboard/8080"]) == set()


def reached(up, service, targets):
    """Those of the targets, each HOST/PORT, to which a service can open a connection."""
    tests = (
        f"timeout 3 bash -c '</dev/tcp/{target}' 2>/dev/null && echo {target}" for target in targets
    )
    command = "; ".join([*tests, "true"])
    return set(up.compose("exec", "-T", service, "sh", "-c", command).stdout.split())


def of_superlink(up):
    """Each port of the SuperLink by its names, and by its address on each network."""
    networks = json.loads(docker("inspect", up.container("superlink")))[0]["NetworkSettings"]
    addresses = [network["IPAddress"] for network in networks["Networks"].values()]
    assert len(addresses) == 3
    hosts = ("superlink", "control", "appio", *addresses)
    return [f"{host}/{port}" for host in hosts for port in (9091, 9092, 9093)]


def own_address(up, network):
    networks = json.loads(docker("inspect", up.container("superlink")))[0]["NetworkSettings"]
    return networks["Networks"][f"{PROJECT}_{network}"]["IPAddress"]


def test_nodes_reach_the_fleet_api_and_no_other(up):
    hosts = ("superlink", own_address(up, "fleet"))
    assert reached(up, "node-0", of_superlink(up)) == {f"{host}/9092" for host in hosts}


def test_serverapps_reach_their_api_and_never_the_control_api(up):
    """Nor any other machine; beside theirs the Fleet API, which admits registered nodes."""
    hosts = ("superlink", "appio", own_address(up, "serverapps"))
    theirs = {f"{host}/{port}" for host in hosts for port in (9091, 9092)}
    assert reached(up, "serverapp", [*of_superlink(up), "node-0/9200"]) == theirs


def test_nodes_and_serverapps_reach_nothing_outside_but_nodes_each_other(up):
    """Neither other machines, nor this one by the address of its end of a container's network."""
    machine = socket.create_server(("0.0.0.0", 0))
    port = machine.getsockname()[1]
    gateways = {
        name: json.loads(docker("network", "inspect", f"{PROJECT}_{name}"))[0]["IPAM"]["Config"][0]
        for name in ("control", "fleet", "serverapps")
    }
    of_machine = {name: f"{config['Gateway']}/{port}" for name, config in gateways.items()}
    elsewhere = [*of_machine.values(), "1.1.1.1/443", "8.8.8.8/53"]

    try:
        assert reached(up, "node-0", ["node-1/9200", *elsewhere]) == {"node-1/9200"}
        assert reached(up, "serverapp", elsewhere) == set()
        assert of_machine["control"] in reached(up, "superlink", elsewhere)  # so it listens
    finally:
        machine.close()


def test_a_run_over_direct_links_alone_goes_through(up):
    run = up.submit(LINKS="direct", ROUNDS="2")
    message, _ = run.communicate(timeout=600)
    assert run.returncode == 0, message
    assert "round   2/2" in message


def test_containers_run_as_nobody_special_and_write_nowhere_else(up):
    for service in ("superlink", "serverapp", "node-0"):
        message = up.compose("exec", "-T", service, "sh", "-c", "id -u; touch /app/x || true")
        assert message.stdout.split() == ["1000"]
        assert "Read-only file system" in message.stderr


def test_keys_are_readable_by_their_owner_only(up):
    message = up.compose("exec", "-T", "node-0", "stat", "-c", "%a %U %n", "/node/login.key").stdout
    assert message.split() == ["600", "flwr", "/node/login.key"]
    listed = up.compose("exec", "-T", "node-0", "ls", "/certs").stdout
    assert listed.split() == []


def test_a_run_goes_on_without_a_node_that_is_killed_and_the_node_comes_back(up):
    up.wait_for_health("node-1", 60)
    run = up.submit(STRATEGY="fedavg", ROUNDS="12")
    read_until(run, "round   3/12")
    os.kill(int(up.inspect("node-1", ".State.Pid")), signal.SIGKILL)
    message, _ = run.communicate(timeout=600)
    assert run.returncode == 0, message
    assert "fedavg" in message
    up.wait_for_health("node-1", 120)
    assert up.inspect("node-1", ".RestartCount") == "1"


def test_a_run_outlives_a_restart_of_the_superlink(up):
    run = up.submit(STRATEGY="fedavg", ROUNDS="30")
    read_until(run, "round   4/30")
    docker("restart", up.container("superlink"))
    message, _ = run.communicate(timeout=600)
    assert run.returncode == 0, message
    assert "round  30/30" in message


def test_a_killed_serverapp_ends_its_run_within_30_s_with_the_signal_and_the_next_run_starts(up):
    run = up.submit(STRATEGY="fedavg", ROUNDS="999")
    read_until(run, "round   3/999")
    assert up.compose("exec", "-T", "serverapp", "python", "-c", KILL_SERVERAPP).returncode == 0
    message, _ = run.communicate(timeout=30)
    assert run.returncode == 1, message
    assert "SIGKILL" in message
    following = up.submit(STRATEGY="fedavg", ROUNDS="1")
    message, _ = following.communicate(timeout=120)
    assert following.returncode == 0, message


def test_a_run_that_fails_ends_with_1(up):
    run = up.submit(STRATEGY="nonsense")
    message, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "failed: strategy = 'nonsense'" in message
