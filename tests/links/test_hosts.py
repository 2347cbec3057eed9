"""Direct links between hosts: SuperLink and two nodes, each in a network namespace of its own."""

import json
import os
import shutil
import subprocess
import time

import pytest
import yaml
from cryptography.x509.oid import ExtendedKeyUsageOID

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.processes import start_bound, stop
from flwr_distill.node.supervisor import status_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and `ip`"
    ),
]


class Hosts:
    """Three hosts, 10.99.0.1 to .3, joined by a bridge in a namespace of its own."""

    def __init__(self):
        self._prefix = f"fd{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number in (1, 2, 3):
            host, port = f"{self._prefix}{number}", f"v{number}"
            ip("netns", "add", host)
            peer = ("peer", "name", port, "netns", self._switch)
            ip("link", "add", "eth0", "netns", host, "type", "veth", *peer)
            ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            ip("-n", host, "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host, "link", "set", device, "up")

    def on(self, number, *command):
        """A command, to be run on a host."""
        return ["ip", "netns", "exec", f"{self._prefix}{number}", *command]

    def drop_packets(self, number, to):
        """Have a host answer another no more."""
        ip("-n", f"{self._prefix}{number}", "route", "add", "blackhole", f"10.99.0.{to}/32")

    def remove(self):
        for name in (*(f"{self._prefix}{number}" for number in (1, 2, 3)), self._switch):
            ip("netns", "delete", name)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces can be made here: {error.stderr.decode()}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def nodes(hosts, authority, tmp_path_factory):
    """Node id of each node's host; a SuperLink with TLS runs on the first one."""
    folder = tmp_path_factory.mktemp("hosts")
    env = LocalFederation(1, folder).env
    superlink = authority.issue("superlink", [ExtendedKeyUsageOID.SERVER_AUTH], address="10.99.0.1")
    processes = [
        start_bound(
            hosts.on(
                1,
                *("flower-superlink", "--disable-runtime-dependency-installation"),
                *("--ssl-ca-certfile", superlink["peer-authority"]),
                *("--ssl-certfile", superlink["peer-certificate"]),
                *("--ssl-keyfile", superlink["peer-key"]),
            ),
            env=env,
            log=folder / "superlink.log",
        )
    ]
    for number in (2, 3):
        host = f"10.99.0.{number}"
        settings = authority.issue(f"node-{number}", address=host)
        settings |= {
            "superlink": "10.99.0.1:9092",
            "root-certificates": settings.pop("peer-authority"),
            "peer-address": f"{host}:9200",
            "state-dir": str(folder / f"node-{number}"),
            "threads": 1,
            "preload": [],
        }
        file = folder / f"node-{number}.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = hosts.on(number, "flwr-distill", "node", "--config", str(file))
        processes.append(start_bound(command, env=env, log=folder / f"node-{number}.log"))
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        '[superlink.hosts]\naddress = "10.99.0.1:9093"\n'
        f'root-certificates = "{superlink["peer-authority"]}"\n'
    )
    try:
        yield env, {online(folder / f"node-{number}"): number for number in (2, 3)}
    finally:
        stop(processes[1:])
        stop(processes[:1])


def online(state_dir):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if status_file(state_dir).exists():
            told = json.loads(status_file(state_dir).read_text())
            if "ready" in told and "online" in told:
                return told["online"]
        time.sleep(0.2)
    raise AssertionError((state_dir.parent / f"{state_dir.name}.log").read_text())


def run(hosts, nodes, app, links):
    env, _ = nodes
    command = ["flwr", "run", str(app), "hosts", "--stream", "-c", f'links="{links}"']
    done = subprocess.run(
        hosts.on(1, *command), env=env, capture_output=True, text=True, timeout=200
    )
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("OUTCOME")]


def test_nodes_on_different_hosts_send_directly_and_by_relay_once_they_cannot(
    hosts, nodes, sending_app
):
    assert run(hosts, nodes, sending_app, "direct") == [["direct", "1"]]
    sender, receiver = (nodes[1][node] for node in sorted(nodes[1]))
    hosts.drop_packets(receiver, to=sender)
    assert run(hosts, nodes, sending_app, "auto") == [["relay", "1"]]
