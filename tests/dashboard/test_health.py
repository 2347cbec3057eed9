"""What the dashboard checks of its machine, and the bounds of what it keeps."""

import contextlib
import datetime
import shutil
from collections import namedtuple

import httpx
import pytest

from flwr_distill.fleet import authority
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.dashboard.access import Access, Role, Tls
from flwr_distill.fleet.dashboard.actions import MAX_EXPORTS, Actions
from flwr_distill.fleet.dashboard.app import MAX_OF_ONE
from flwr_distill.fleet.dashboard.health import checks, read_certificates
from flwr_distill.fleet.dashboard.runs import RunFolder, run_of
from flwr_distill.fleet.local_federation import free_ports

from .served import served
from .test_files import write


@pytest.fixture
def certs(tmp_path):
    certificates = CertificateFolder(tmp_path / "certs")
    certificates.create(400)
    certificates.issue_node("soon", [], 5)
    certificates.issue_node("late", [], 100)
    return tmp_path / "certs"


def bad(folders=(), issued=()):
    return [check.what for check in checks("here", "", 0.0, folders, issued) if not check.fine]


def test_a_certificate_that_soon_expires_and_a_disk_that_is_nearly_full_are_not_fine(
    certs, tmp_path, monkeypatch
):
    assert bad(issued=read_certificates(certs)) == ["Certificate of soon"]
    assert bad([tmp_path]) == []
    usage = namedtuple("Usage", "total used free")(10**12, 10**12 - 10**9, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert bad([tmp_path]) == [f"Disk of {tmp_path}"]


def test_nobody_is_admitted_once_the_list_of_revocations_has_expired(certs, monkeypatch):
    access = Access(Tls(*(certs / name for name in ("a", "b", "ca.crt", "ca.crl"))))
    valid = {"serialNumber": "0A", "notAfter": "Jan  1 00:00:00 2100 GMT"}
    certificate = {**valid, "subject": ((("organizationalUnitName", "viewer"),),)}
    assert access.role(certificate) is Role.VIEWER
    later = authority.now() + datetime.timedelta(days=5000)
    monkeypatch.setattr(authority, "now", lambda: later)
    assert access.role(certificate) is Role.NOBODY


def test_the_last_exports_are_kept(tmp_path, monkeypatch):
    def export(self, runs_dir, name, target):
        write(target, model_safetensors="weights")

    monkeypatch.setattr(Actions, "_run_export", export)
    (tmp_path / "exports").mkdir()
    actions = Actions(None, tmp_path / "exports")
    for number in range(MAX_EXPORTS + 2):
        folder = RunFolder(
            write(
                tmp_path / "runs" / str(number),
                settings_json={},
                about_json={},
                metrics_jsonl="",
                journal_jsonl="",
            )
        )
        folder.update()
        actions.export(run_of(folder, None))
    kept = {folder.name for folder in (tmp_path / "exports").iterdir()}
    assert kept == {str(number + 2) for number in range(MAX_EXPORTS)}


def test_a_user_has_so_many_pages_open_and_no_more(tmp_path):
    (port,) = free_ports(1)
    where = ("--port", port, "--insecure", "--superlink", "127.0.0.1:9")
    limits = httpx.Limits(max_connections=100)
    with (
        served(*where, cwd=tmp_path) as address,
        contextlib.ExitStack() as stack,
    ):
        client = stack.enter_context(httpx.Client(limits=limits, timeout=30))
        for _ in range(MAX_OF_ONE):
            stream = stack.enter_context(client.stream("GET", f"{address}/events"))
            assert stream.status_code == 200
        assert client.get(f"{address}/events").status_code == 503
