"""Nodes of a federation with certificates, mailboxes over real gRPC, and the server's links."""

import datetime
import ipaddress
import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_distill.client.session import RunSource
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.links.mailbox import Mailbox, start_server
from flwr_distill.links.records import Introduction
from flwr_distill.links.routes import Links
from flwr_distill.links.transfer import introduce
from flwr_distill.node.notes import Notes
from flwr_distill.node.supervisor import MAILBOX_ENVIRONMENT
from flwr_distill.storage.store import NodeStore
from tests.apps import pyproject
from tests.waiting import wait_until

RUN = 2**63 + 5
SENDER, RECEIVER, STRANGER = 2**64 - 17, 2**64 - 18, 2**64 - 19


SENDING_APP = {
    "pyproject.toml": pyproject("sending", 'links = "direct"'),
    "sending/__init__.py": "",
    "sending/client.py": """
from dataclasses import dataclass
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr_distill.links import introduce, receive, send
from flwr_distill.storage.store import NodeStore

app = ClientApp()

class Session:
    def __init__(self, context):
        self.run_id, self.node_id = context.run_id, context.node_id
        self.node_config = context.node_config
        self.store = NodeStore.open(context.node_config["state-dir"], self.run_id, self.node_id)

@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"metrics": metrics, "introduction": introduce(Session(context))})
    return Message(content, reply_to=message)

@app.train("send")
def give(message: Message, context: Context) -> Message:
    parcel = send(Session(context), message.content["route"], b"a planted pattern" * 100_000)
    return Message(RecordDict({"parcel": parcel}), reply_to=message)

@app.train("receive")
def take(message: Message, context: Context) -> Message:
    payload = receive(Session(context), message.content["delivery"], "pattern")
    same = payload == b"a planted pattern" * 100_000
    return Message(RecordDict({"metrics": MetricRecord({"same": int(same)})}), reply_to=message)
""",
    "sending/server.py": """
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr_distill.links.routes import Links
from flwr_distill.strategies.common.directory import Directory

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    sender, receiver = sorted(grid.get_node_ids())
    found = Directory().look_up(grid, [sender, receiver], 60)
    introductions = {node: described.introduction for node, described in found.items()}
    links = Links(introductions, context.run_config["links"])
    route = links.route(sender, receiver, "pattern")
    (reply,) = grid.send_and_receive(
        [Message(RecordDict({"route": route}), sender, "train.send")], timeout=60
    )
    parcel = reply.content["parcel"]
    delivery = links.forward(route, parcel)
    (reply,) = grid.send_and_receive(
        [Message(RecordDict({"delivery": delivery}), receiver, "train.receive")], timeout=60
    )
    print("OUTCOME", parcel["link"], reply.content["metrics"]["same"], flush=True)
""",
}


class Party:
    """What links need of a session."""

    def __init__(self, folder, node_id, run_id=RUN, **node_config):
        self.run_id, self.node_id = run_id, node_id
        self.state_dir = folder / str(node_id)
        self.node_config = {"state-dir": str(self.state_dir), **node_config}
        self.store = NodeStore.open(self.state_dir, run_id, node_id)
        self.source = RunSource()

    @property
    def mailbox(self):
        """Parcels that lie in the mailbox, begun ones too."""
        return sorted(path.name for path in (self.store.folder / "links" / "mailbox").glob("*"))


class Authority:
    """A certificate authority that writes what it issues as PEM files into a folder."""

    BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)

    def __init__(self, folder, name):
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name, self.file = name, folder / f"{name}.crt"
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(name, self.key).add_extension(constraints, critical=True)
        self._write(self.file, builder)

    def issue(self, name, usage=BOTH, days=1, address="127.0.0.1"):
        """Node config with a certificate for an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        host = x509.IPAddress(ipaddress.ip_address(address))
        builder = self._builder(name, key, days).add_extension(
            x509.SubjectAlternativeName([host]), critical=False
        )
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        certificate = self.folder / f"{self.name}-{name}.crt"
        self._write(certificate, builder)
        key_file = certificate.with_suffix(".key")
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return {
            "peer-authority": str(self.file),
            "peer-certificate": str(certificate),
            "peer-key": str(key_file),
        }

    def _builder(self, subject, key, days=1):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    def _write(self, file, builder):
        signed = builder.sign(self.key, hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"), "federation")


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other-authority"), "elsewhere")


@pytest.fixture
def party(tmp_path):
    """Make a node: ``party(SENDER)``; a sender is of this machine, as the mailboxes here are."""

    def make(node_id, **settings):
        own = {"peer-address": "127.0.0.1:1"} if node_id == SENDER else {}
        return Party(tmp_path, node_id, **{**own, **settings})

    return make


@pytest.fixture
def listening(party):
    """Make a node with a mailbox: ``listening(RECEIVER)``."""
    with ExitStack() as stack:

        def make(node_id, capacity=2**26, **settings):
            made = party(node_id, **settings)
            server, port = start_server(
                Mailbox(made.state_dir, capacity=capacity),
                "127.0.0.1:0",
                made.node_config,
            )
            stack.callback(lambda: server.stop(grace=None).wait())
            made.node_config["peer-address"] = f"127.0.0.1:{port}"
            return made

        yield make


@pytest.fixture
def mailbox_process(party, tmp_path):
    """Make a node with a mailbox in a process of its own: it and the file of its log."""
    with ExitStack() as stack:

        def make(node_id, **settings):
            (port,) = free_ports(1)
            made = party(node_id, **settings, **{"peer-address": f"127.0.0.1:{port}"})
            config, log_file = tmp_path / "node-config.toml", tmp_path / "mailbox.log"
            config.write_text(
                "".join(f"{k} = {json.dumps(v)}\n" for k, v in made.node_config.items())
            )
            reports, theirs = Notes.pair()
            stack.enter_context(reports)
            with theirs, log_file.open("w") as stderr:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "flwr_distill.node.mailbox"),
                        *(str(theirs.fileno()), str(config)),
                    ],
                    env={**os.environ, **MAILBOX_ENVIRONMENT},
                    pass_fds=[theirs.fileno()],
                    stderr=stderr,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda: "listening" in log_file.read_text(), why=log_file.read_text)
            return made, log_file

        yield make


@pytest.fixture
def links_of():
    """Make the server's links of nodes, as they introduce themselves."""

    def make(*parties, mode="auto"):
        told = {p.node_id: Introduction.checked(introduce(p), "introduction") for p in parties}
        return Links(told, mode)

    return make


@pytest.fixture(scope="session")
def sending_app(tmp_path_factory):
    """Directory of an app whose ServerApp has one node send to another."""
    folder = tmp_path_factory.mktemp("sending-app")
    (folder / "sending").mkdir()
    for name, text in SENDING_APP.items():
        (folder / name).write_text(text)
    return folder
