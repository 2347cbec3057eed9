"""Hosts on this machine, each a network namespace; only root can make them."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and `ip`"
)


class Hosts:
    """Hosts by address, joined by a bridge in a namespace of its own, without a route out."""

    def __init__(self, addresses):
        self._names = {address: f"fd{os.getpid()}-{n}" for n, address in enumerate(addresses)}
        self._switch = f"fd{os.getpid()}-switch"
        self._made = []
        for namespace in (self._switch, *self._names.values()):
            ip("netns", "add", namespace)
            self._made.append(namespace)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, (address, host) in enumerate(self._names.items()):
            ends = ("netns", host, "type", "veth", "peer", "name", f"v{number}")
            ip("link", "add", "eth0", *ends, "netns", self._switch)
            ip("-n", self._switch, "link", "set", f"v{number}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host, "link", "set", device, "up")

    def on(self, address, *command):
        """A command, to be run on a host."""
        return ["ip", "netns", "exec", self._names[address], *map(str, command)]

    def drop_packets(self, address, to):
        """Have a host answer another no more."""
        ip("-n", self._names[address], "route", "add", "blackhole", f"{to}/32")

    def remove(self):
        for namespace in self._made:
            ip("netns", "delete", namespace)


@contextmanager
def hosts_at(*addresses):
    """Make hosts; skips the test where that fails, as in most containers."""
    try:
        created = Hosts(addresses)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces can be made here: {error.stderr.decode()}")
    try:
        yield created
    finally:
        created.remove()


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
