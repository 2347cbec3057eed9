"""README's node on another machine, with the installed Flower: TLS, node keys, `hospital`."""

from contextlib import ExitStack

import numpy as np
import pytest

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.fleet.servers import Addresses
from flwr_distill.flower.control import open_control
from flwr_distill.node.stock import is_another, is_stock
from flwr_distill.task.datasets import load_dataset
from tests.waiting import wait_until

from .machines import Machines

POLICY = "extends: hospital\nclasses: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
RUN = (
    'strategy="fedavg" num-rounds=1 min-nodes=2 train.dp-noise=1.0 dataset="private" '
    'private.shape="1x8x8" model="digits-cnn"'
)


@pytest.mark.deployment("TLS, node keys, `register`, `certs revoke`, with a policy")
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(is_stock(), reason="Flower's own SuperNode does the work of our node here")
def test_registered_nodes_with_a_policy_train_and_a_revoked_one_is_shut_out(tmp_path):
    digits = load_dataset("digits").train
    np.savez(tmp_path / "scans.npz", images=digits.images[:, 0], labels=digits.labels)
    (tmp_path / "policy.yaml").write_text(POLICY)
    port, *others = free_ports(3)
    addresses = Addresses.beside(f"127.0.0.1:{port}", *others)
    with ExitStack() as processes:
        machines = Machines(tmp_path, processes)
        for words in (
            ("certs", "init"),
            ("certs", "server", "--host", "127.0.0.1"),
            *(("certs", "node", name) for name in ("ward-1", "ward-2")),
        ):
            assert machines.do(*words)[0] == 0, words
        machines.start_superlink(addresses)
        for state in (": registered", "already registered"):
            code, output = machines.do("register", "--superlink", addresses.control)
            assert (code, output.count(state)) == (0, 2), output
        for name in ("ward-1", "ward-2"):
            machines.start(
                name,
                *("node", "--superlink", addresses.fleet, "--root-certificates", "certs/ca.crt"),
                *("--auth-key", f"certs/{name}/login.key", "--data", "scans.npz"),
                *("--policy", "policy.yaml", "--state-dir", f"state/{name}", "--device", "cpu"),
            )
        where = ("--superlink", addresses.control, "--root-certificates", "certs/ca.crt")
        code, output = machines.do("run", *where, "-c", RUN)
        assert code == 0, output
        assert ("Flower's own SuperLink" in machines.log("superlink")) == is_another()
        code, output = machines.do("certs", "revoke", "ward-2", "--superlink", addresses.control)
        assert code == 0, output
        assert "is revoked" in output
        with open_control(addresses.control, tmp_path / "certs" / "ca.crt") as control:
            wait_until(
                lambda: [node.status for node in control.nodes()] == ["online"],
                why=lambda: machines.log("ward-2")[-2000:],
            )
