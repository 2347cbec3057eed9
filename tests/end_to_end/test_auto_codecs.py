"""``auto`` codecs on real processes: nodes that call this machine's address beyond loopback."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.simulation import coded

from .runs import complete, journal, rows

NODES = 3


def own_address():
    """An address of this machine that is not loopback; empty if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        address = probe.getsockname()[0]
        return "" if address.startswith("127.") else address
    return ""


def pumped(source, target):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def forwarded(host, port):
    """An address at `host` from which connections are passed to a port on loopback."""
    opened = []
    with socket.create_server((host, 0)) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    opened.append(near)
                    try:
                        far = socket.create_connection(("127.0.0.1", port))
                    except ConnectionRefusedError:  # the SuperLink has not started
                        near.close()
                        continue
                    opened.append(far)
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pumped, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"{host}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for each in opened:
        each.close()


@pytest.mark.slow
def test_real_nodes_beyond_loopback_get_the_codecs_that_a_simulation_chooses(tmp_path, monkeypatch):
    host = own_address()
    if not host:
        pytest.skip("this machine has loopback alone")
    config = {
        **{"strategy": "fedavg", "num-rounds": 3, "min-nodes": NODES, "train.batch-size": 64},
        **{"down-codec": "auto", "up-codec": "auto"},
    }
    monkeypatch.setattr(coded, "LOOPBACK", False)
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    simulated = run_in_process(config, nodes, tmp_path / "simulated")
    (port,) = free_ports(1)
    with forwarded(host, port) as address:
        settings = {"superlink": address}
        state = tmp_path / "state"
        with LocalFederation(NODES, state, port=port, node_settings=settings) as federation:
            folder = complete(federation, tmp_path / "runs", config)
    names = [
        [(e["round"], e["codecs"]["down"], e["codecs"]["up"]) for e in journal(f) if "codecs" in e]
        for f in (folder, tmp_path / "simulated" / "1")
    ]
    assert names[0] == names[1]
    assert [server_round for server_round, *_ in names[0]] == [0, 1, 2]
    for row, same in zip(rows(folder), simulated, strict=True):
        assert row["accuracy"] == pytest.approx(same["accuracy"], abs=1e-5)


@pytest.mark.slow
def test_real_nodes_on_loopback_get_float32(tmp_path):
    config = {"strategy": "fedavg", "num-rounds": 1, "down-codec": "auto", "up-codec": "auto"}
    with LocalFederation(2, tmp_path / "state") as federation:
        folder = complete(federation, tmp_path / "runs", config)
    (choice,) = [entry["codecs"] for entry in journal(folder) if "codecs" in entry]
    assert (choice["down"], choice["up"]) == ("float32", "float32")
