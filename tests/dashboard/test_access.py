"""Beyond loopback users are admitted by certificate and role; on loopback no foreign page acts."""

import re
import socket
import ssl
import subprocess
from collections import deque

import httpx
import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import free_ports

from .served import COMMAND, served

NOWHERE = ("--insecure", "--superlink", "127.0.0.1:9")
PAGES = ("/submit", "/runs/compare", "/outboxes/node-0")


def context(certs, name=None):
    found = ssl.create_default_context(cafile=certs / "ca.crt")
    if name:
        file = "user.crt" if (certs / name / "user.crt").exists() else "node.crt"
        found.load_cert_chain(certs / name / file, (certs / name / file).with_suffix(".key"))
    return found


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls") / "certs"
    certificates = CertificateFolder(folder)
    certificates.create(30)
    certificates.issue_server(["127.0.0.1", "localhost"], 20)
    for role in ("viewer", "submitter", "operator"):
        certificates.issue_user(role, role, 20)
    for name in ("dismissed", "withdrawn"):
        certificates.issue_user(name, "operator", 20)
    certificates.issue_node("ward-3", [], 20)
    return folder


@pytest.fixture(scope="module")
def secured(certs, tmp_path_factory):
    server = certs / "server"
    (port,) = free_ports(1)
    options = [
        *("--ssl-certfile", server / "server.crt", "--ssl-keyfile", server / "server.key"),
        *("--ssl-ca-certfile", certs / "ca.crt", "--ssl-crlfile", certs / "ca.crl"),
        *("--host", "0.0.0.0", "--port", port, "--allow-actions", *NOWHERE),
    ]
    with served(*options, cwd=tmp_path_factory.mktemp("here")) as address:
        yield address.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("there")
    with served("--port", port, "--allow-actions", *NOWHERE, cwd=folder) as address:
        yield address


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("viewer", (403, 400, 403)),
        ("submitter", (200, 400, 403)),
        ("operator", (200, 400, 404)),
    ],
)
def test_each_role_reaches_its_pages_and_no_others(secured, certs, name, statuses):
    with httpx.Client(verify=context(certs, name)) as client:
        assert tuple(client.get(secured + page).status_code for page in PAGES) == statuses


@pytest.mark.parametrize("name", [None, "ward-3"])
def test_nobody_without_a_users_certificate_gets_an_answer(secured, certs, name):
    with httpx.Client(verify=context(certs, name)) as client, pytest.raises(httpx.HTTPError):
        client.get(f"{secured}/runs/compare")


def test_a_revoked_user_is_refused_at_once_by_a_dashboard_that_runs(secured, certs):
    with httpx.Client(verify=context(certs, "dismissed")) as client:
        assert client.get(f"{secured}/submit").status_code == 200
        CertificateFolder(certs).mark_revoked("dismissed")
        assert client.get(f"{secured}/submit").status_code == 403
    with httpx.Client(verify=context(certs, "operator")) as client:
        assert client.get(f"{secured}/submit").status_code == 200


def test_an_open_page_of_a_revoked_user_ends_and_so_does_a_request_that_never_comes(secured, certs):
    host, port = secured.partition("://")[2].split(":")
    raw = socket.create_connection((host, int(port)))
    slow = context(certs, "viewer").wrap_socket(raw, server_hostname=host)
    slow.sendall(b"GET / HTTP/1.1\r\n")
    with (
        httpx.Client(verify=context(certs, "withdrawn"), timeout=30) as client,
        client.stream("GET", f"{secured}/events") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith((":", "data:"))
        CertificateFolder(certs).mark_revoked("withdrawn")
        deque(lines, maxlen=0)
    slow.settimeout(30)
    assert slow.recv(1) == b""
    slow.close()


def test_it_does_not_start_beyond_loopback_without_tls(tmp_path):
    command = [*COMMAND, "--host", "0.0.0.0", *NOWHERE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--ssl-certfile" in done.stderr


def token(client, address):
    return re.search(r'name="token" value="([^"]+)"', client.get(f"{address}/submit").text)[1]


def test_foreign_pages_can_neither_read_nor_act(plain):
    form = {"settings": "num-rounds=1", "preset": ""}
    with httpx.Client() as client:
        foreign = client.get(f"{plain}/submit", headers={"Host": "evil.example"})
        assert foreign.status_code == 400
        own = {**form, "token": token(client, plain)}
        submit = f"{plain}/submit"
        assert client.post(submit, data=form).status_code == 403
        assert client.post(submit, data={**form, "token": "guess"}).status_code == 403
        evil = {"Origin": "http://evil.example"}
        assert client.post(submit, data=own, headers=evil).status_code == 403
        assert client.post(submit, data={**own, "settings": 50_000 * "x"}).status_code == 413
        policy = client.get(submit).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_no_link_puts_words_into_the_pages_mouth(plain):
    with httpx.Client() as client:
        assert "Call this number" not in client.get(f"{plain}/submit?done=Call+this+number").text


def test_wrong_settings_are_said_where_they_were_typed(plain):
    with httpx.Client() as client:
        form = {"token": token(client, plain), "preset": "", "settings": "num-rounds=-1 <b>"}
        answer = client.post(f"{plain}/submit", data=form)
        assert answer.status_code == 400
        assert "num-rounds=-1 &lt;b&gt;" in answer.text
        for settings in ("/etc/passwd.toml", "x=" + 2000 * "["):
            form["settings"] = settings
            assert client.post(f"{plain}/submit", data=form).status_code == 400


def test_without_leave_to_act_there_is_nothing_to_act_with(tmp_path):
    (port,) = free_ports(1)
    with served("--port", port, *NOWHERE, cwd=tmp_path) as address, httpx.Client() as client:
        assert client.get(f"{address}/submit").status_code == 404
        assert client.post(f"{address}/runs/1/stop").status_code in (404, 405)
