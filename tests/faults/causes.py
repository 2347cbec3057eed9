"""Faults of a deployment, one function each: it breaks something, and repairs it.

A cause yields the process that must say what happened, and after the repair the process that must
come up. Each is a real one, of the commands that sites use.
"""

import contextlib
import datetime
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from flwr_distill.fleet import authority
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import environment, free_ports
from flwr_distill.node.processes import start_bound, stop
from tests.environments import flwr_distill
from tests.proxies import proxy

LATE = 600


@dataclass(frozen=True)
class Started:
    """A process to start: a node if it has a state directory, else a SuperLink at `port`."""

    command: list[str]
    env: dict[str, str]
    state_dir: Path | None = None
    port: int = 0


@dataclass
class Site:
    """A folder with certificates, and SuperLinks and nodes that use them."""

    folder: Path
    running: list = field(default_factory=list)

    def __post_init__(self):
        self.env = environment(self.folder / "flower")
        self.certs = CertificateFolder(self.folder / "certs")
        self.fleet, self.control, self.apps = free_ports(3)

    def ours(self, *arguments):
        flwr_distill(self.env, *arguments)

    def superlink(self, *arguments, tls=("--insecure",)):
        command = [
            *("flwr-distill", "superlink", "--isolation", "process"),
            *("--fleet-api-address", f"127.0.0.1:{self.fleet}"),
            *("--control-api-address", f"127.0.0.1:{self.control}"),
            *("--serverappio-api-address", f"127.0.0.1:{self.apps}"),
            *map(str, (*tls, *arguments)),
        ]
        return Started(command, self.env, port=self.control)

    def secured(self):
        server = self.folder / "certs" / "server"
        files = {"ca-cert": "ca.crt", "cert": "server.crt", "key": "server.key"}
        tls = [part for key, name in files.items() for part in (f"--ssl-{key}file", server / name)]
        return self.superlink("--enable-supernode-auth", tls=tls)

    def node(self, *arguments, host="127.0.0.1", name="ward-3", **env):
        file = self.folder / f"{name}.yaml"
        file.write_text("preload: []\nconnect-timeout: 3\n")
        state_dir = self.folder / name
        command = [
            *("flwr-distill", "node", "--config", str(file), "--name", name),
            *("--superlink", f"{host}:{self.fleet}", "--state-dir", str(state_dir)),
            *map(str, arguments),
        ]
        return Started(command, {**self.env, **env}, state_dir)

    def start(self, started, name):
        log = self.folder / f"{name}.log"
        process = start_bound(started.command, env=started.env, log=log)
        self.running.append(process)
        return process, log

    def up(self, started, name="superlink"):
        """Start a SuperLink and wait until its Control API listens."""
        process, log = self.start(started, name)
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", started.port), 0.1).close()
                return process
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        raise AssertionError(log.read_text())

    def stop(self):
        stop(self.running)
        self.running.clear()

    def keys(self):
        """Options of a node with a key that the SuperLink knows."""
        self.ours("register", "--dir", self.certs_dir, "--superlink", f"127.0.0.1:{self.control}")
        files = self.certs_dir / "ward-3"
        return "--root-certificates", files / "ca.crt", "--auth-key", files / "login.key"

    @property
    def certs_dir(self):
        return self.folder / "certs"

    def issue(self, *hosts):
        self.certs.create(400)
        self.certs.issue_server(hosts or ["127.0.0.1", "localhost"], 10)
        self.certs.issue_node("ward-3", [], 10)


@contextlib.contextmanager
def small_disk(folder, size="64k", *options):
    """A file system of its own at a folder; only root can make one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
    if sys.platform != "linux" or subprocess.run([*mount, folder], check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def expired_certificate(site):
    past = authority.now() - datetime.timedelta(days=100)
    with mock.patch.object(authority, "now", return_value=past):
        site.issue()
    yield from _bad_server(site, lambda: site.certs.renew("server", 10))


def wrong_host(site):
    site.issue("elsewhere.example")

    def repair():
        site.certs.mark_revoked("server")
        shutil.rmtree(site.certs_dir / "server")
        site.certs.issue_server(["127.0.0.1", "localhost"], 10)

    yield from _bad_server(site, repair)


def _bad_server(site, repair):
    process = site.up(site.secured())
    files = site.certs_dir / "ward-3"
    node = site.node("--root-certificates", files / "ca.crt", "--auth-key", files / "login.key")
    yield node
    stop([process])
    repair()
    site.up(site.secured(), "superlink-again")
    yield site.node(*site.keys())


def revoked(site):
    site.issue()
    site.up(site.secured())
    keys = site.keys()
    control = f"127.0.0.1:{site.control}"
    site.ours("certs", "revoke", "ward-3", "--dir", site.certs_dir, "--superlink", control)
    yield site.node(*keys)
    site.ours("certs", "node", "ward-4", "--dir", site.certs_dir)
    site.keys()
    files = site.certs_dir / "ward-4"
    keys = "--root-certificates", files / "ca.crt", "--auth-key", files / "login.key"
    yield site.node(*keys, name="ward-4")


def late_clock(site):
    from tests.faults.conftest import LATE_CLOCK, compiled

    source = LATE_CLOCK.replace("240", str(LATE))
    if (library := compiled(source, site.folder / "late.so")) is None:
        pytest.skip("needs a C compiler and LD_PRELOAD")
    site.issue()
    site.up(site.secured())
    keys = site.keys()
    yield site.node(*keys, LD_PRELOAD=str(library))
    yield site.node(*keys)


def dns_gone(site):
    site.up(site.superlink())
    yield site.node("--insecure", host="superlink.invalid")
    yield site.node("--insecure")


def proxy_wants_password(site):
    site.up(site.superlink())
    with proxy(password="ward:secret") as asking:
        yield site.node("--insecure", host="superlink.example", **asking.variables)
    yield site.node("--insecure")


def port_in_use(site):
    with socket.create_server(("127.0.0.1", site.fleet)):
        yield site.superlink()
    yield site.superlink()


def database_corrupt(site):
    file = site.folder / "superlink.db"
    file.write_bytes(os.urandom(8192))
    yield site.superlink("--database", file)
    file.unlink()
    yield site.superlink("--database", file)


def database_read_only(site):
    folder = site.folder / "database"
    with small_disk(folder, "1m", "ro"):
        yield site.superlink("--database", folder / "superlink.db")
    yield site.superlink("--database", folder / "superlink.db")


def database_locked(site):
    file = site.folder / "superlink.db"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield site.superlink("--database", file)
    yield site.superlink("--database", file)


def superlink_disk_full(site):
    folder = site.folder / "database"
    with small_disk(folder):
        fill(folder)
        yield site.superlink("--database", folder / "superlink.db")
    yield site.superlink("--database", folder / "superlink.db")


def node_disk_full(site):
    site.up(site.superlink())
    with small_disk(site.folder / "ward-3"):
        fill(site.folder / "ward-3")
        yield site.node("--insecure")
    yield site.node("--insecure")


def data_gone(site):
    site.up(site.superlink())
    data = site.folder / "pictures"
    yield site.node("--insecure", "--data", data)
    yield site.node("--insecure")


FAULTS = {
    "the SuperLink's certificate has expired": (expired_certificate, ("expired", "certs renew")),
    "the SuperLink's certificate names another host": (wrong_host, ("127.0.0.1", "--host")),
    "the node's certificate is revoked": (revoked, ("ward-3", "key", "register")),
    "the node's clock is ten minutes off": (late_clock, ("clock", "doctor")),
    "DNS is gone": (dns_gone, ("superlink.invalid", "name")),
    "a proxy answers 407": (proxy_wants_password, ("407", "proxy")),
    "a port is in use": (port_in_use, ("in use", "--fleet-api-address")),
    "the SuperLink's database is corrupt": (database_corrupt, ("superlink.db", "--database")),
    "the SuperLink's database is read-only": (database_read_only, ("superlink.db", "--database")),
    "the SuperLink's database is locked": (database_locked, ("superlink.db", "locked")),
    "the SuperLink's disk is full": (superlink_disk_full, ("superlink.db", "full")),
    "the node's disk is full": (node_disk_full, ("state-dir", "space")),
    "the node's data folder is missing": (data_gone, ("data", "pictures")),
}
"""Cause, and what one line must name: what is broken, and what repairs it."""
CONTINUES = {"the node's clock is ten minutes off"}
"""Faults after which the node tries again; after the others its process ends with an error."""
