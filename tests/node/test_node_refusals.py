"""A node that cannot work says why in one line; a key that is refused for a while is not that."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.node.processes import start_bound, stop
from flwr_distill.node.supervisor import status_file
from tests.waiting import node_status, wait_for_node, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class SecureSuperLink:
    """A SuperLink with TLS that admits registered nodes only."""

    address: str
    env: dict[str, str]
    authority: Path

    def register(self, public_key: Path) -> None:
        subprocess.run(
            ["flwr", "supernode", "register", str(public_key), "secure"],
            env=self.env,
            check=True,
            capture_output=True,
        )

    def node_command(self, state_dir: Path, *arguments: str) -> list[str]:
        return [
            *("flwr-distill", "node", "--superlink", self.address),
            *("--root-certificates", str(self.authority), "--state-dir", str(state_dir)),
            *("--config", str(no_preload(state_dir)), *arguments),
        ]

    def run_node(self, state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.node_command(state_dir, *arguments),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )


def no_preload(state_dir: Path) -> Path:
    file = state_dir.parent / f"{state_dir.name}.yaml"
    file.write_text("preload: []\n")
    return file


def write_key(folder: Path) -> tuple[Path, Path]:
    """A node's key for its login, and the public one."""
    issuer = CertificateFolder(folder / "certs")
    issuer.create(days=30)
    issuer.issue_node("ward", ["localhost"], days=9)
    own = folder / "certs" / "ward"
    return own / "login.key", own / "login.pub"


@pytest.fixture(scope="module")
def superlink(
    certificates: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureSuperLink]:
    folder = tmp_path_factory.mktemp("secure-superlink")
    fleet, control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(3))
    env = LocalFederation(1, folder).env
    home = Path(env["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink.secure]\naddress = "{control}"\n'
        f'root-certificates = "{certificates.authority}"\n'
    )
    process = start_bound(
        [
            *("flower-superlink", "--enable-supernode-auth"),
            *("--ssl-ca-certfile", str(certificates.authority)),
            *("--ssl-certfile", str(certificates.server)),
            *("--ssl-keyfile", str(certificates.key)),
            *("--fleet-api-address", fleet, "--control-api-address", control),
            *("--serverappio-api-address", serverappio),
        ],
        env=env,
        log=folder / "superlink.log",
    )
    yield SecureSuperLink(fleet, env, certificates.authority)
    stop([process])


def test_a_key_that_is_not_registered_is_said_in_one_line(
    superlink: SecureSuperLink, tmp_path: Path
) -> None:
    private, _ = write_key(tmp_path)
    ended = superlink.run_node(tmp_path / "state", "--auth-key", str(private))
    assert ended.returncode == 1
    assert "does not know this node's key: register it" in ended.stderr.splitlines()[-1]
    assert f"auth-key = '{private}'" in ended.stderr.splitlines()[-1]


def test_a_node_without_a_key_is_told_to_have_one(
    superlink: SecureSuperLink, tmp_path: Path
) -> None:
    ended = superlink.run_node(tmp_path / "state")
    assert ended.returncode == 1
    assert "admits registered nodes only" in ended.stderr.splitlines()[-1]


def test_a_device_that_is_not_there_is_said_in_one_line(
    superlink: SecureSuperLink, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path)
    superlink.register(public)
    ended = superlink.run_node(
        tmp_path / "state", "--auth-key", str(private), "--device", "cuda:99"
    )
    assert ended.returncode == 1
    assert "device=cuda:99" in ended.stderr.splitlines()[-1]


def test_a_registered_node_that_was_killed_is_retried_until_it_is_admitted_again(
    superlink: SecureSuperLink, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path)
    superlink.register(public)
    state_dir = tmp_path / "state"
    log = tmp_path / "node.log"
    node = start_bound(
        superlink.node_command(state_dir, "--auth-key", str(private)), env=superlink.env, log=log
    )
    try:
        before = wait_for_node(state_dir, log)
        os.kill(before["supernode"], signal.SIGKILL)

        def is_back() -> dict[str, Any]:
            status = node_status(state_dir)
            is_new = "online" in status and status["supernode"] != before["supernode"]
            return status if is_new else {}

        after = wait_until(is_back, 120, log.read_text)
        assert after["online"] == before["online"]
        assert after["starts"] > 2  # it was refused at least once
        node.terminate()
        assert node.wait(timeout=20) == 0
        assert not status_file(state_dir).exists()
    finally:
        stop([node])
