"""Direct links between hosts: SuperLink and two nodes, each in a network namespace of its own."""

import subprocess

import pytest
import yaml
from cryptography.x509.oid import ExtendedKeyUsageOID

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.processes import start_bound, stop
from tests.hosts import hosts_at, needs_hosts
from tests.waiting import wait_for_node

pytestmark = [pytest.mark.slow, needs_hosts]
SERVER, NODES = "10.99.0.1", ("10.99.0.2", "10.99.0.3")


@pytest.fixture(scope="module")
def hosts():
    with hosts_at(SERVER, *NODES) as created:
        yield created


@pytest.fixture(scope="module")
def nodes(hosts, authority, tmp_path_factory):
    """Node id of each node's host; a SuperLink with TLS runs on the first one."""
    folder = tmp_path_factory.mktemp("hosts")
    env = LocalFederation(1, folder).env
    superlink = authority.issue("superlink", [ExtendedKeyUsageOID.SERVER_AUTH], address=SERVER)
    processes = [
        start_bound(
            hosts.on(
                SERVER,
                *("flower-superlink", "--disable-runtime-dependency-installation"),
                *("--ssl-ca-certfile", superlink["peer-authority"]),
                *("--ssl-certfile", superlink["peer-certificate"]),
                *("--ssl-keyfile", superlink["peer-key"]),
            ),
            env=env,
            log=folder / "superlink.log",
        )
    ]
    for host in NODES:
        settings = authority.issue(f"node-{host}", address=host)
        settings |= {
            "superlink": f"{SERVER}:9092",
            "root-certificates": settings.pop("peer-authority"),
            "peer-address": f"{host}:9200",
            "state-dir": str(folder / host),
            "threads": 1,
            "preload": [],
        }
        file = folder / f"{host}.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = hosts.on(host, "flwr-distill", "node", "--config", file)
        processes.append(start_bound(command, env=env, log=folder / f"{host}.log"))
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink.hosts]\naddress = "{SERVER}:9093"\n'
        f'root-certificates = "{superlink["peer-authority"]}"\n'
    )
    try:
        online = {h: wait_for_node(folder / h, folder / f"{h}.log", "ready") for h in NODES}
        yield env, {status["online"]: host for host, status in online.items()}
    finally:
        stop(processes[1:])
        stop(processes[:1])


def run(hosts, nodes, app, links):
    env, _ = nodes
    command = ["flwr", "run", str(app), "hosts", "--stream", "-c", f'links="{links}"']
    command = hosts.on(SERVER, *command)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("OUTCOME")]


def test_nodes_on_different_hosts_send_directly_and_by_relay_once_they_cannot(
    hosts, nodes, sending_app
):
    assert run(hosts, nodes, sending_app, "direct") == [["direct", "1"]]
    sender, receiver = (nodes[1][node] for node in sorted(nodes[1]))
    hosts.drop_packets(receiver, to=sender)
    assert run(hosts, nodes, sending_app, "auto") == [["relay", "1"]]
