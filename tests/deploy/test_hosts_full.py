"""HFLDD over three hosts, each in a network namespace: TLS, node keys, direct links, no way out."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from flwr_distill.node.processes import start_bound, stop
from tests.environments import flwr_distill
from tests.hosts import hosts_at, needs_hosts
from tests.waiting import wait_for_node

ROOT = Path(__file__).resolve().parents[2]
SERVER, NODES = "10.98.0.1", ("10.98.0.2", "10.98.0.3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    needs_hosts,
]


@pytest.fixture(scope="module")
def hosts():
    with hosts_at(SERVER, *NODES) as created:
        yield created


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
            wait_for_node(folder / f"state-{number}", log, "ready")
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
