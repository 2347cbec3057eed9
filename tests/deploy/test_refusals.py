"""Who is not admitted is refused over real TLS, and told why in one line of its own log."""

import subprocess

import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.node.processes import start_bound, stop
from tests.waiting import wait_for_node

NOT_KNOWN = "does not know this node's key"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory):
    folder = CertificateFolder(tmp_path_factory.mktemp("elsewhere"))
    folder.create(10)
    return folder.certificate


def refusal(deployed, tmp_path, *arguments):
    """Last line of the log of a node that ends by itself, which must be all that it says."""
    ended = subprocess.run(
        deployed.node_command(tmp_path / "state", *arguments),
        env=deployed.env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    reason = [line for line in ended.stderr.splitlines() if line.startswith("flwr-distill node: ")]
    assert len(reason) == 1, ended.stderr
    assert ended.stderr.splitlines()[-1] == reason[0]
    return reason[0]


def ca_and_key(files):
    return "--root-certificates", files / "ca.crt", "--auth-key", files / "login.key"


def test_a_node_without_a_key(deployed, tmp_path):
    reason = refusal(deployed, tmp_path, "--root-certificates", deployed.certs / "ca.crt")
    assert "auth-key" in reason


def test_a_node_with_a_key_that_is_not_registered(deployed, tmp_path):
    reason = refusal(deployed, tmp_path, *ca_and_key(deployed.issue("unregistered")))
    assert NOT_KNOWN in reason


def test_a_superlink_with_a_certificate_of_another_authority(deployed, tmp_path, other_authority):
    files = deployed.issue("elsewhere")
    reason = refusal(
        deployed,
        tmp_path,
        "--root-certificates",
        other_authority,
        "--auth-key",
        files / "login.key",
    )
    assert "not trusted" in reason


def test_a_client_without_tls(deployed, tmp_path):
    reason = refusal(deployed, tmp_path, "--insecure")
    assert deployed.fleet in reason
    assert "does TLS match?" in reason


def test_registering_twice_changes_nothing_and_a_revoked_node_is_shut_out(deployed, tmp_path):
    files = deployed.issue("ward-3")
    before, after = deployed.register(), deployed.register()
    (mine,) = (line for line in before if line.startswith("ward-3: registered"))
    node_id = int(mine.rpartition(" ")[2])
    assert f"ward-3: already registered, Flower's node id is {node_id}" in after

    log = tmp_path / "node.log"
    command = deployed.node_command(tmp_path / "admitted", *ca_and_key(files))
    node = start_bound(command, env=deployed.env, log=log)
    try:
        assert wait_for_node(tmp_path / "admitted", log)["online"] == node_id
        deployed.revoke("ward-3")
        assert node.wait(timeout=60) == 1
    finally:
        stop([node])
    assert NOT_KNOWN in log.read_text().splitlines()[-1]
    assert NOT_KNOWN in refusal(deployed, tmp_path, *ca_and_key(files))
    assert not any(line.startswith("ward-3") for line in deployed.register())
