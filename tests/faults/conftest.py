"""A federation to break: as deployed, and as root with a host and a small disk for each node."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import CONNECTION, LocalFederation, free_ports
from flwr_distill.fleet.servers import (
    Addresses,
    serverapps_command,
    superlink_command,
    write_connection,
)
from flwr_distill.flower.control import open_control
from flwr_distill.node.processes import kill_group, start_bound, stop
from flwr_distill.node.secret import appio_secret
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NODES = 5

LATE_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec -= 240;
    return failed;
}
"""
"""Comes before the C library in a node's processes: their clock is four minutes behind.

Time namespaces cannot do this, they shift the time since boot only. Flower admits no node whose
clock is more than 5 s ahead or 305 s behind.
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def compiled(source, library):
    """The library; None without a C compiler, and where LD_PRELOAD does nothing."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return None
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=source, text=True, check=True)
    return library


class Hosts:
    """Network namespaces, one for each node, joined to this machine by a bridge in another one."""

    def __init__(self, number):
        pid = os.getpid()
        self._prefix, subnet = f"ff{pid}", f"10.{64 + pid // 256 % 64}.{pid % 256}"
        self.address = f"{subnet}.254"
        self._made = []
        switch = self._make("switch")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        ends = ("type", "veth", "peer", "name", "here", "netns", switch)
        ip("link", "add", self._prefix, *ends)
        ip("-n", switch, "link", "set", "here", "master", "br0", "up")
        ip("addr", "add", f"{self.address}/24", "dev", self._prefix)
        ip("link", "set", self._prefix, "up")
        for i in range(number):
            host = self._make(i)
            ends = ("type", "veth", "peer", "name", f"v{i}", "netns", switch)
            ip("link", "add", "eth0", "netns", host, *ends)
            ip("-n", switch, "link", "set", f"v{i}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{subnet}.{i + 1}/24", "dev", "eth0")
            self.connect(i)
            ip("-n", host, "link", "set", "lo", "up")

    def _make(self, name):
        namespace = f"{self._prefix}-{name}"
        ip("netns", "add", namespace)
        self._made.append(namespace)
        return namespace

    def on(self, i, command):
        return ["ip", "netns", "exec", f"{self._prefix}-{i}", *command]

    def connect(self, i):
        ip("-n", f"{self._prefix}-{i}", "link", "set", "eth0", "up")

    def remove(self):
        for namespace in self._made:  # links go with them
            ip("netns", "delete", namespace)


class Federation(LocalFederation):
    """Real nodes; the SuperLink keeps its state in a file, and ServerApps have their own process.

    `faults` is the folder that the app in this folder looks into.
    """

    def __init__(self, folder, hosts=None, num_nodes=NODES):
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.hosts = hosts
        self._ports = free_ports(3)
        self._servers, self._disks = [], []
        self._late = set()
        super().__init__(num_nodes, folder / "state", database=folder / "superlink.db")
        self.env["FAULTS"] = str(self.faults)
        self.late_clock = compiled(LATE_CLOCK, folder / "late-clock.so")

    def node_command(self, settings):
        index = int(settings.parent.name.removeprefix("node-"))
        command = super().node_command(settings)
        if index in self._late:
            command = ["env", f"LD_PRELOAD={self.late_clock}", *command]
        return self.hosts.on(index, command) if self.hosts else command

    def _start_nurseries(self):
        """None: what they fork would not be on a node's own host, nor have its clock."""

    def _start_superlink(self):
        fleet, *others = self._ports
        host = self.hosts.address if self.hosts else "127.0.0.1"
        addresses = Addresses.beside(f"{host}:{fleet}", *others)
        self.fleet_address, self.control_address = addresses.fleet, addresses.control
        write_connection(Path(self.env["FLWR_HOME"]), CONNECTION, addresses.control)
        secret = appio_secret(self.state_dir)
        command = superlink_command(addresses, secret, None, self._database)
        self._superlink = start_bound(command, log=self.superlink_log, env=self.env)
        if not self._servers:  # they outlive the SuperLink
            command = serverapps_command(addresses, secret, os.getpid())
            self._servers.append(start_bound(command, log=self.server_log, env=self.env))
        self._wait_for_superlink(60)

    @property
    def server_log(self):
        return self.state_dir / "serverapp.log"

    @property
    def small_disks(self):
        """Whether each node's state directory is a disk of its own, of 64 MB."""
        return len(self._disks) == len(self.nodes)

    def start(self, **settings):
        for node in self.nodes if self.hosts else ():
            node.state_dir.mkdir(parents=True)
            mount = ("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(node.state_dir))
            if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                self._disks.append(node.state_dir)
        super().start(**settings)

    def stop(self):
        super().stop()
        stop(self._servers)
        for disk in self._disks:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
        self._disks.clear()

    def restart_superlink(self):
        kill_group(self._superlink)
        self._start_superlink()

    def status(self, index):
        return self.nodes[index].status

    def online(self):
        """Number of each node by Flower's id."""
        states = enumerate(self.status(i) for i in range(len(self.nodes)))
        return {status["online"]: i for i, status in states if "online" in status}

    def go_on(self, index):
        """Let a stopped node continue."""
        for part in ("pid", "supernode", "executor", "mailbox", "worker"):
            with suppress(ProcessLookupError, KeyError):
                os.kill(self.status(index)[part], signal.SIGCONT)

    def set_clock(self, index, *, late):
        """Restart a node with a clock that is late, or right again."""
        (self._late.add if late else self._late.discard)(index)
        self.nodes[index].restart()

    def make_whole(self, ghosts=()):
        """Start dead nodes again and wait for all; those that are gone are unregistered."""
        with open_control(self.control_address) as control:
            for node in ghosts:
                control.unregister(node)
        self.restart_dead_nodes()
        wait_until(lambda: all({"online", "ready"} <= node.status.keys() for node in self.nodes))
        self.wait_for_nodes(timeout=60)


@pytest.fixture(scope="session")
def hosts():
    """A host for each node; None without the right to make them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield None
        return
    try:
        namespaces = Hosts(NODES)
    except subprocess.CalledProcessError:
        yield None
        return
    yield namespaces
    namespaces.remove()


@pytest.fixture(scope="session")
def federation(hosts, tmp_path_factory):
    """The federation."""
    with Federation(tmp_path_factory.mktemp("federation"), hosts) as running:
        yield running


def app_with_faults(folder, server="faulty.server", client="faulty.client"):
    """Our app with these modules of the folder ``app``, in a folder of its own."""
    shutil.copytree(Path(__file__).parent / "app", folder / "faulty")
    text = (ROOT / "pyproject.toml").read_text()
    ours = text[text.index("[tool.flwr.app]") :]
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "faulty"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n'
        + ours.replace("flwr_distill.server.app:app", f"{server}:app").replace(
            "flwr_distill.client_app:app", f"{client}:app"
        )
    )
    return folder


@pytest.fixture(scope="session")
def faulty_app(tmp_path_factory):
    """Our app with the faults of this folder."""
    return app_with_faults(tmp_path_factory.mktemp("faulty-app"))
