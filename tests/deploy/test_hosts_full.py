"""HFLDD over three hosts, each in a network namespace: TLS, node keys, direct links, no way out."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from flwr_distill.node.processes import start_bound, stop
from flwr_distill.node.supervisor import status_file

ROOT = Path(__file__).resolve().parents[2]
SERVER, NODES = "10.98.0.1", ("10.98.0.2", "10.98.0.3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and `ip`"
    ),
]


class Hosts:
    """Hosts by address, joined by a bridge in a namespace of its own, without a route out."""

    def __init__(self, addresses):
        self._names = {address: f"fdd{os.getpid()}-{n}" for n, address in enumerate(addresses)}
        self._switch = f"fdd{os.getpid()}-switch"
        self._made = []
        for namespace in (self._switch, *self._names.values()):
            ip("netns", "add", namespace)
            self._made.append(namespace)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, (address, host) in enumerate(self._names.items()):
            ends = ("netns", host, "type", "veth", "peer", "name", f"v{number}")
            ip("link", "add", "eth0", *ends, "netns", self._switch)
            ip("-n", self._switch, "link", "set", f"v{number}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host, "link", "set", device, "up")

    def on(self, address, *command):
        """A command, to be run on a host."""
        return ["ip", "netns", "exec", self._names[address], *map(str, command)]

    def remove(self):
        for namespace in self._made:
            ip("netns", "delete", namespace)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    try:
        created = Hosts((SERVER, *NODES))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces can be made here: {error.stderr.decode()}")
    yield created
    created.remove()


def flwr_distill(env, *arguments):
    done = subprocess.run(
        ["flwr-distill", *map(str, arguments)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def settings_of(number, address, certs, folder):
    """A node's YAML file, as docs/deploy.md writes it."""
    files = certs / f"node-{number}"
    settings = {
        "superlink": f"{SERVER}:9092",
        "root-certificates": str(files / "ca.crt"),
        "auth-key": str(files / "login.key"),
        "peer-address": f"{address}:9200",
        "peer-authority": str(files / "nodes-ca.crt"),
        "peer-certificate": str(files / "node.crt"),
        "peer-key": str(files / "node.key"),
        "partition-id": number,
        "num-partitions": len(NODES),
        "state-dir": str(folder / f"state-{number}"),
        "threads": 1,
    }
    file = folder / f"node-{number}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def wait_until_warm(state_dir, log):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = status_file(state_dir)
        if status.exists() and {"online", "ready"} <= json.loads(status.read_text()).keys():
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def federation(hosts, tmp_path_factory, env):
    """The certificates' folder, and the nodes' logs."""
    folder = tmp_path_factory.mktemp("hosts")
    certs = folder / "certs"
    where = ("--dir", certs)
    flwr_distill(env, "certs", "init", *where)
    flwr_distill(env, "certs", "server", *where, "--host", SERVER)
    for number, address in enumerate(NODES):
        flwr_distill(env, "certs", "node", f"node-{number}", *where, "--host", address)
    server = certs / "server"
    superlink = (
        *("flwr-distill", "superlink", "--enable-supernode-auth"),
        *("--disable-runtime-dependency-installation", "--database", folder / "state.db"),
        *("--ssl-ca-certfile", server / "ca.crt", "--ssl-certfile", server / "server.crt"),
        *("--ssl-keyfile", server / "server.key"),
    )
    started = [start_bound(hosts.on(SERVER, *superlink), env=env, log=folder / "superlink.log")]
    try:
        register = ("flwr-distill", "register", *where, "--superlink", f"{SERVER}:9093")
        subprocess.run(hosts.on(SERVER, *register), env=env, check=True, capture_output=True)
        logs = []
        for number, address in enumerate(NODES):
            file = settings_of(number, address, certs, folder)
            logs.append(folder / f"node-{number}.log")
            command = hosts.on(address, "flwr-distill", "node", "--config", file)
            started.append(start_bound(command, env=env, log=logs[-1]))
        for number, log in enumerate(logs):
            wait_until_warm(folder / f"state-{number}", log)
        yield certs, logs
    finally:
        stop(started[1:])
        stop(started[:1])


def test_a_full_run_over_three_hosts_sends_virtual_data_from_node_to_node(
    hosts, federation, env, tmp_path
):
    certs, logs = federation
    config = 'num-rounds=3 links="direct" partition.classes=5 hfldd.groups=2 '
    config += f'hfldd.rotate=false runs-dir="{tmp_path}"'
    command = (
        *("flwr-distill", "run", "--superlink", f"{SERVER}:9093"),
        *("--root-certificates", certs / "ca.crt", "--runs-dir", tmp_path, "-c", config),
    )
    done = subprocess.run(
        hosts.on(SERVER, *command),
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hfldd" in done.stdout.splitlines()[-3]
    (summary,) = tmp_path.glob("*/summary.json")
    results = json.loads(summary.read_text())
    traffic = json.loads((summary.parent / "traffic.json").read_text())
    links = {link for phase in traffic["measured"].values() for link in phase}
    assert "member->head, direct" in links
    assert "member->head, relayed" not in links
    assert results["link_bytes"] > 0
    received = [log for log in logs if " bytes from node" in log.read_text()]
    assert len(received) == 1  # the head's mailbox


def test_the_hosts_have_no_way_out(hosts):
    for address in (SERVER, *NODES):
        routes = subprocess.run(
            hosts.on(address, "ip", "route"), check=True, capture_output=True, text=True
        ).stdout
        assert "default" not in routes
        assert len(routes.splitlines()) == 1
