"""Two edges with two nodes each, as real processes with TLS; one edge is killed in mid-run."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.fleet.servers import (
    Addresses,
    ServerCertificate,
    by_name,
    serverapps_command,
    superlink_command,
)
from flwr_distill.fleet.submission import submit
from flwr_distill.flower.control import open_control
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.node.nursery import NODE
from flwr_distill.node.processes import kill_group, start_bound, stop
from flwr_distill.node.secret import appio_secret
from tests.environments import PROGRAM

from .runs import read, rows

READY = re.compile(r"round +(\d+)/")

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2400)]
ROUNDS = 1000
"""More than there is time for: the run is stopped when the edge has come back."""
KILLED_IN = 2


class Tiers:
    """A SuperLink above, edges, and nodes below, all of one authority."""

    def __init__(self, folder, stack):
        self.folder, self.stack, self.edges = folder, stack, []
        self.authority = CertificateFolder(folder / "certs")
        self.authority.create(30)
        self.authority.issue_server(["127.0.0.1", "localhost"], 10)
        server = folder / "certs" / "server"
        files = (server / name for name in ("ca.crt", "server.crt", "server.key"))
        self.certificate = ServerCertificate(*files)
        self.env = LocalFederation(1, folder / "above").env
        port, *others = free_ports(3)
        self.above = Addresses.beside(f"127.0.0.1:{port}", *others)
        secret = appio_secret(folder / "above")
        database = folder / "above" / "superlink.db"
        command = superlink_command(self.above, secret, self.certificate, database)
        superlink = self.start("above", command)
        apps = serverapps_command(self.above, secret, superlink.pid, self.certificate)
        self.start("above", apps)

    def start(self, name, command):
        log = self.folder / f"{name}.log"
        process = start_bound(command, log=log, env=self.env, cwd=self.folder)
        self.stack.callback(stop, [process], grace=300.0)
        return process

    def control(self, address=None):
        address = by_name(address or self.above.control)
        control = open_control(address, self.authority.certificate)
        control.wait(600.0)
        return control

    def key(self, name, address=None):
        """The key of a node that is registered at a SuperLink."""
        issued = self.authority.issue_node(name, ["localhost"], 10)
        with self.control(address) as control:
            control.register(issued.login_key)
        return self.folder / "certs" / name / "login.key"

    def edge(self, index, port, key):
        return self.start(
            f"edge-{index}",
            [
                *(*PROGRAM, "edge", "--name", f"region-{index}"),
                *("--superlink", self.above.fleet, "--auth-key", str(key)),
                *("--root-certificates", str(self.authority.certificate)),
                *("--state-dir", str(self.folder / f"edge-{index}")),
                *("--below-address", f"127.0.0.1:{port}"),
                *("--below-certificates", str(self.folder / "certs" / "server")),
            ],
        )

    def node(self, place, port):
        key = self.key(
            f"node-{place}", Addresses.beside(f"127.0.0.1:{port}", port + 1, port + 2).control
        )
        settings = {
            "superlink": f"127.0.0.1:{port}",
            "root-certificates": str(self.authority.certificate),
            "auth-key": str(key),
            **{"partition-id": place, "num-partitions": 4, "threads": 1, "preload": []},
            "state-dir": str(self.folder / f"node-{place}"),
        }
        file = self.folder / f"node-{place}.yaml"
        file.write_text(yaml.safe_dump(settings))
        self.start(f"node-{place}", [sys.executable, "-P", "-m", NODE, str(file)])


def rounds_below(folder):
    files = Path(folder, "below", "runs").glob("*/metrics.jsonl")
    return [[row["round"] for row in rows(file.parent)] for file in files]


@pytest.mark.deployment("edges with TLS, one killed in a run")
def test_a_run_goes_on_when_an_edge_is_killed_and_comes_back(tmp_path):
    with ExitStack() as stack:
        tiers = Tiers(tmp_path, stack)
        ports, processes = free_ports(2), []
        keys = [tiers.key(f"region-{index}") for index in range(2)]
        for index, (port, key) in enumerate(zip(ports, keys, strict=True)):
            processes.append(tiers.edge(index, port, key))
        for place in range(4):
            tiers.node(place, ports[place // 2])

        def follow(line):
            if not (done := READY.search(line)):
                return
            if int(done[1]) == KILLED_IN and len(killed_in) == 0:
                killed_in.append(rounds_below(tmp_path / "edge-0")[0][-1])
                kill_group(processes[0])
                processes[0] = tiers.edge(0, ports[0], keys[0])
            elif killed_in and rounds_below(tmp_path / "edge-0")[0][-1] > killed_in[0] + 1:
                with tiers.control() as control:
                    # More lines may come after the stop.
                    for run in control.runs():
                        if not run.status.finished:
                            control.stop_run(run.run_id)

        killed_in = []
        settings = {
            **{"strategy": "fedavg", "num-rounds": ROUNDS, "min-nodes": 2, "model": "mlp"},
            **{"train.local-epochs": 1, "partition.classes": 5, "phase-timeout": 300.0},
            "runs-dir": str(tmp_path / "runs"),
        }
        outcome = submit(APP_DIR, settings, control=tiers.control, on_line=follow, timeout=1800)
        assert outcome.status == "finished:stopped", "\n".join(outcome.lines[-30:])
    (killed,), (other,) = rounds_below(tmp_path / "edge-0"), rounds_below(tmp_path / "edge-1")
    assert other == list(range(len(other)))  # it took part in all rounds
    assert killed[: KILLED_IN + 1] == list(range(KILLED_IN + 1))
    assert killed == sorted(set(killed))  # no round counts twice
    assert killed[-1] > KILLED_IN + 1, "it came back"
    first, *_, last = rows(tmp_path / "runs" / str(outcome.run_id))
    assert last["accuracy"] > first["accuracy"] + 0.2
    for edge in range(2):  # SIGTERM had the runs below write theirs
        (file,) = tmp_path.glob(f"edge-{edge}/below/runs/*/summary.json")
        assert any("Ended after" in text for text in read(file.parent, "summary")["warnings"])
