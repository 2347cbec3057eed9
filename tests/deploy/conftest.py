"""A SuperLink as it is deployed: certificates of `flwr-distill certs`, registered nodes only."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.node.processes import start_bound, stop
from tests.environments import flwr_distill


@dataclass(frozen=True)
class Deployed:
    """A SuperLink with TLS that admits registered nodes only."""

    certs: Path
    fleet: str
    control: str
    env: dict[str, str]

    def issue(self, name):
        """A node's folder with files, of which the SuperLink does not know yet."""
        flwr_distill(self.env, "certs", "node", name, "--dir", self.certs)
        return self.certs / name

    def register(self):
        where = ("--dir", self.certs, "--superlink", self.control)
        return flwr_distill(self.env, "register", *where).splitlines()

    def revoke(self, name):
        where = ("--dir", self.certs, "--superlink", self.control)
        flwr_distill(self.env, "certs", "revoke", name, *where)

    def node_command(self, state_dir, *arguments):
        """Command of a node without torch."""
        file = state_dir.with_suffix(".yaml")
        file.write_text("preload: []\nconnect-timeout: 3\n")
        return [
            *("flwr-distill", "node", "--config", str(file), "--superlink", self.fleet),
            *("--state-dir", str(state_dir), *map(str, arguments)),
        ]


@pytest.fixture(scope="session")
def env():
    """Environment in which this installation's commands are found."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**os.environ, **quiet, "PATH": path}


@pytest.fixture(scope="session")
def deployed(tmp_path_factory, env):
    folder = tmp_path_factory.mktemp("deployed")
    certs = folder / "certs"
    fleet, control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(3))
    created = Deployed(certs, fleet, control, env)
    for command in (("init",), ("server", "--host", "127.0.0.1", "--host", "localhost")):
        flwr_distill(env, "certs", *command, "--dir", certs)
    superlink = start_bound(
        [
            *("flower-superlink", "--enable-supernode-auth", "--isolation", "process"),
            *("--ssl-ca-certfile", str(certs / "server/ca.crt")),
            *("--ssl-certfile", str(certs / "server/server.crt")),
            *("--ssl-keyfile", str(certs / "server/server.key")),
            *("--fleet-api-address", fleet, "--control-api-address", control),
            *("--serverappio-api-address", serverappio),
        ],
        env=env,
        log=folder / "superlink.log",
    )
    yield created
    stop([superlink])
