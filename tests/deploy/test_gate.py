"""nginx with docker/gate/nginx.conf in front of a real SuperLink admits users by their role."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.flower.line_1_32.fleet.superlink import (
    Control,
    SuperLinkError,
    User,
)

CONF = Path(__file__).resolve().parents[2] / "docker/gate/nginx.conf"
RUN = "the run was not accepted"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


@pytest.fixture(scope="module")
def gate(deployed, tmp_path_factory):
    """Address of a gate, and a function that has it read its files anew."""
    folder = tmp_path_factory.mktemp("gate")
    (port,) = free_ports(1)
    text = CONF.read_text()
    for here, there in (
        ("/tmp/", f"{folder}/"),
        ("listen 9093", f"listen 127.0.0.1:{port}"),
        ("control:9093", deployed.control),
        ("grpc_ssl_name control", "grpc_ssl_name localhost"),
        ("/gate/server", str(deployed.certs / "server")),
        ("/gate/public", str(deployed.certs)),
        ("/dev/stdout", f"{folder}/access.log"),
    ):
        assert here in text, here
        text = text.replace(here, there)
    conf = folder / "nginx.conf"
    conf.write_text(text)
    nginx = ["nginx", "-c", str(conf), "-e", str(folder / "error.log")]
    process = subprocess.Popen([*nginx, "-g", "daemon off;"])
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def reload():
        subprocess.run([*nginx, "-s", "reload"], check=True)
        time.sleep(0.5)  # nginx tells nobody when its new workers are there

    yield f"127.0.0.1:{port}", reload
    process.terminate()
    process.wait(timeout=10)


@pytest.fixture(scope="module")
def users(deployed):
    """Users of each role, and a node, by name."""
    authority = CertificateFolder(deployed.certs)
    for role in ("viewer", "submitter", "operator"):
        authority.issue_user(role, role, 5)
    authority.issue_node("ward-9", [], 5)
    stems = {"viewer": "user", "submitter": "user", "operator": "user", "ward-9": "node"}
    return {
        name: User(deployed.certs / name / f"{stem}.crt", deployed.certs / name / f"{stem}.key")
        for name, stem in stems.items()
    }


@pytest.mark.parametrize(
    ("name", "sees", "submits", "registers"),
    [
        ("viewer", True, False, False),
        ("submitter", True, True, False),
        ("operator", True, True, True),
        ("ward-9", False, False, False),
    ],
)
def test_a_role_may_do_what_it_is_for(deployed, gate, users, name, sees, submits, registers):
    authority = CertificateFolder(deployed.certs)
    node = authority.issue_node(f"of-{name}", [], 5)
    with Control(gate[0], authority.certificate, users[name]) as control:
        if not sees:
            with pytest.raises(SuperLinkError, match=r"does not admit you: .* --user-certificate"):
                control.wait(10)
            return
        control.wait(10)
        # An app that is none: the SuperLink itself refuses it, if the gate lets it pass.
        with pytest.raises(SuperLinkError, match=RUN) as refused:
            control.start_run(b"no bundle", {})
        assert ("403" in str(refused.value)) != submits
        if registers:
            assert control.register(node.login_key)[1]
        else:
            with pytest.raises(SuperLinkError, match="403"):
                control.register(node.login_key)


def test_nobody_passes_without_a_certificate_nor_with_a_revoked_one(deployed, gate, users):
    address, reload = gate
    authority = CertificateFolder(deployed.certs)
    authority.issue_user("leaver", "operator", 5)
    leaver = User(deployed.certs / "leaver/user.crt", deployed.certs / "leaver/user.key")
    with Control(address, authority.certificate, leaver) as control:
        assert control.answers(timeout=10)
    authority.mark_revoked("leaver")
    reload()
    for user in (None, leaver):
        with (
            Control(address, authority.certificate, user) as control,
            pytest.raises(SuperLinkError, match="does not admit you"),
        ):
            control.wait(10)
