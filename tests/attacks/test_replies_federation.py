"""One registered node replies for all others, to real SuperLinks with TLS and node keys.

Ours refuses it though the attacker has the ids of their messages. A stock SuperLink believes it;
there the attacker has to guess the ids, and ServerApps that know the nodes' keys reject it.
"""

import copy
import json
import re
import sqlite3
import threading
from contextlib import ExitStack, closing, suppress

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.fleet.servers import (
    Addresses,
    ServerCertificate,
    environment,
    serverapps_command,
    superlink_command,
)
from flwr_distill.fleet.submission import submit
from flwr_distill.flower.line_1_32.fleet.superlink import Control
from flwr_distill.flower.line_1_32.server.inbox import KEYS_VARIABLE
from flwr_distill.node.processes import start_bound, stop
from flwr_distill.node.secret import appio_secret
from flwr_distill.protocol.signatures import sign
from tests.apps import pyproject
from tests.environments import flwr_distill

pytestmark = pytest.mark.slow

HONEST = 2
PHASES = 2
MICROSECONDS = 300
"""As far apart as messages of a phase are made, and more."""
APP = {
    "pyproject.toml": pyproject("asking", f"nodes = {HONEST + 1}\nphases = {PHASES}"),
    "asking/__init__.py": "",
    "asking/client.py": """
import time
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def answer(message: Message, context: Context) -> Message:
    time.sleep(message.content["config"]["seconds"])  # the attacker has time
    return Message(RecordDict({"answer": MetricRecord({"value": 1.0})}), reply_to=message)
""",
    "asking/server.py": """
import json, time
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.transport import Transport

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    grid = RunGrid(Transport(grid, deadline=60))
    config = context.run_config
    while len(nodes := grid.get_node_ids()) < config["nodes"]:
        time.sleep(0.1)
    for phase in range(config["phases"]):
        content = RecordDict({"config": ConfigRecord({"seconds": 4.0})})
        replies = grid.send_and_receive([Message(content, node, "query") for node in nodes])
        print("VALUES", json.dumps({
            reply.metadata.src_node_id: reply.content["answer"]["value"]
            for reply in replies if reply.has_content()
        }), flush=True)
""",
}


class Attacker:
    """A registered node that answers its own message honestly, and then those of all others."""

    def __init__(self, address, authority, key_file, node_id, others, find):
        self.node, self.others, self._find = Node(node_id=node_id), others, find
        key = load_ssh_private_key(key_file.read_bytes(), None)
        tls = grpc.ssl_channel_credentials(authority.read_bytes())
        self._channel = grpc.secure_channel(address, tls)
        signing = NodeAuthClientInterceptor(key, key.public_key())
        self.stub = FleetStub(grpc.intercept_channel(self._channel, signing))
        self._key = key
        self.tries = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._attack, daemon=True)

    def __enter__(self):
        public_key = public_key_to_bytes(self._key.public_key())
        self.stub.ActivateNode(ActivateNodeRequest(public_key=public_key, heartbeat_interval=30))
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._end.set()
        self._thread.join(20)
        self._channel.close()

    def _attack(self):
        while not self._end.wait(0.05):
            self.stub.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30)
            )
            found = self.stub.PullMessages(PullMessagesRequest(node=self.node))
            if found.messages_list:
                run_id = found.messages_list[0].metadata.run_id
                message = self._received(run_id, found.message_object_trees[0])
                self._reply(message, message.metadata.message_id, self.node.node_id, 1.0)
                for victim in self.others:
                    for message_id in self._find(message, victim):
                        self.tries += 1
                        if self._reply(message, message_id, victim, -1.0):
                            break

    def _received(self, run_id, tree):
        contents, parts = {}, [part.object_id for part in iterate_object_tree(tree)]
        while len(contents) < len(parts) and not self._end.wait(0.02):
            for part in parts:
                request = PullObjectRequest(node=self.node, run_id=run_id, object_id=part)
                answer = self.stub.PullObject(request)
                if answer.object_available:
                    contents[part] = answer.object_content
        message = inflate_object_from_contents(tree.object_id, contents)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _reply(self, message, message_id, sender, value):
        """Reply as a sender to a message; return whether the SuperLink has taken it."""
        reply = Message(RecordDict({"answer": MetricRecord({"value": value})}), reply_to=message)
        reply.metadata.__dict__ |= {"_src_node_id": sender, "_reply_to_message_id": message_id}
        reply.metadata.ttl = 5.0
        reply.metadata.__dict__["_message_id"] = reply.object_id
        header = message_to_proto(remove_content_from_message(reply))
        sign(header.metadata, self._key)
        with suppress(grpc.RpcError):
            response = self.stub.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[header],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.1],
                )
            )
            if reply.object_id not in response.results:
                return False
            for name, part in get_all_nested_objects(reply).items():
                self.stub.PushObject(
                    PushObjectRequest(
                        node=self.node,
                        run_id=message.metadata.run_id,
                        object_id=name,
                        object_content=part.deflate(),
                    )
                )
            return True
        return False


class Federation:
    """A SuperLink with TLS and node keys, what starts ServerApps, and honest nodes.

    With `keys`, ServerApps know the nodes' keys.
    """

    def __init__(self, folder, stock, keys):
        self.folder, self.database = folder, folder / "superlink.db"
        self.env = environment(folder / "flower")
        self.certs = folder / "certs"
        addresses = Addresses(*(f"127.0.0.1:{port}" for port in free_ports(3)))
        self.fleet, self.control_address = addresses.fleet, addresses.control
        self.names = [*(f"ward-{place}" for place in range(HONEST)), "mallory"]
        for command in (
            ("init",),
            ("server", "--host", "127.0.0.1", "--host", "localhost"),
            *(("node", name) for name in self.names),
        ):
            flwr_distill(self.env, "certs", *command, "--dir", self.certs)
        server = self.certs / "server"
        files = (server / name for name in ("ca.crt", "server.crt", "server.key"))
        secret = appio_secret(folder)
        command = superlink_command(addresses, secret, ServerCertificate(*files), self.database)
        if stock:
            command = ["flower-superlink", *command[command.index("superlink") + 1 :]]
        self.processes = [start_bound(command, log=self.log("superlink"), env=self.env)]
        with self.control() as control:
            control.wait(60.0)
        where = ("--dir", self.certs, "--superlink", self.control_address)
        output = flwr_distill(self.env, "register", *where)
        self.ids = {}
        for name in self.names:
            (line,) = (line for line in output.splitlines() if re.search(rf"\b{name}\b", line))
            self.ids[name] = int(re.search(r"\d{10,}", line)[0])
        apps = serverapps_command(addresses, secret, self.processes[0].pid)
        known = {KEYS_VARIABLE: str(self.certs / "nodes.json")} if keys else {}
        env = {**self.env, **known}
        self.processes.append(start_bound(apps, log=self.log("serverapps"), env=env))
        for name in self.names[:HONEST]:
            file = folder / f"{name}.yaml"
            file.write_text("preload: []\npolicy: open\n")
            command = [
                *("flwr-distill", "node", "--config", str(file), "--superlink", self.fleet),
                *("--root-certificates", str(server / "ca.crt"), "--state-dir", str(folder / name)),
                *("--auth-key", str(self.certs / name / "login.key")),
            ]
            self.processes.append(start_bound(command, log=self.log(name), env=self.env))

    def log(self, name):
        return self.folder / f"{name}.log"

    def control(self):
        return Control(self.control_address, self.certs / "server/ca.crt")

    def attacked(self, find):
        """Run the app under attack; return what it was told by each node, in each phase."""
        for name, text in APP.items():
            file = self.folder / "app" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        others = [self.ids[name] for name in self.names[:HONEST]]
        files = self.certs / "server/ca.crt", self.certs / "mallory/login.key"
        with Attacker(self.fleet, *files, self.ids["mallory"], others, find) as attacker:
            outcome = submit(self.folder / "app", {}, control=self.control, timeout=150)
        assert outcome.completed, "\n".join(outcome.lines)
        self.tries = attacker.tries
        printed = [match[1] for line in outcome.lines if (match := re.match(r"VALUES (.*)", line))]
        return [{int(node): value for node, value in json.loads(text).items()} for text in printed]

    def given(self, message, victim):
        """The ids of a node's messages, from the SuperLink's database."""
        signed = victim - 2**64 if victim >= 2**63 else victim
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "SELECT message_id FROM message_ins WHERE dst_node_id = ?", (signed,)
            ).fetchall()
        return [message_id for (message_id,) in rows]


def guessed(message, victim):
    """Ids that a node's message may have, by one's own message, nearest in time first."""
    for far in sorted(range(-MICROSECONDS, MICROSECONDS + 1), key=abs):
        guess = copy.deepcopy(message)
        guess.metadata.dst_node_id = victim
        guess.metadata.created_at = round(message.metadata.created_at + far * 1e-6, 6)
        yield guess.object_id


@pytest.fixture
def federation(tmp_path):
    with ExitStack() as stack:

        def start(*, stock, keys=False):
            started = Federation(tmp_path, stock, keys)
            stack.callback(stop, started.processes[::-1])
            return started

        yield start


def test_without_tls_each_call_is_still_bound_to_the_key_that_has_registered(tmp_path):
    """Anyone may join `flwr-distill up`, but not call for a node of another key."""
    with LocalFederation(1, tmp_path, node_settings={"preload": []}) as local, ExitStack() as stack:
        with Control(local.control_address) as control:
            (victim,) = control._stub.ListNodes(ListNodesRequest()).nodes_info
        key = ec.generate_private_key(ec.SECP256R1())
        channel = stack.enter_context(grpc.insecure_channel(local.fleet_address))
        signing = NodeAuthClientInterceptor(key, key.public_key())
        stub = FleetStub(grpc.intercept_channel(channel, signing))
        request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(key.public_key()))
        own = stub.RegisterNode(request).node_id
        forged = PushMessagesRequest(node=Node(node_id=own), messages_list=[ProtoMessage()])
        forged.messages_list[0].metadata.src_node_id = victim.node_id
        forged.message_object_trees.append(ObjectTree(object_id="0" * 64))
        start = ActivateNodeRequest(public_key=victim.public_key, heartbeat_interval=30)
        poll = PullMessagesRequest(node=Node(node_id=victim.node_id))
        removal = UnregisterNodeFleetRequest(node_id=victim.node_id)
        for call, request, code in (
            (stub.PushMessages, forged, "PERMISSION_DENIED"),
            (stub.ActivateNode, start, "PERMISSION_DENIED"),
            (stub.PullMessages, poll, "UNAUTHENTICATED"),
            (stub.UnregisterNode, removal, "UNAUTHENTICATED"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(request)
            assert error.value.code().name == code


def honest(federation):
    return [dict.fromkeys(federation.ids.values(), 1.0)] * PHASES


def test_our_superlink_takes_no_reply_for_another_node_whoever_knows_the_ids(federation):
    ours = federation(stock=False)
    assert ours.attacked(ours.given) == honest(ours)
    assert ours.tries >= HONEST * PHASES
    refusals = ours.log("superlink").read_text()
    for name in ours.names[:HONEST]:
        text = f"node {ours.ids['mallory']} replies in the name of node {ours.ids[name]}"
        assert text in refusals


def test_on_a_stock_superlink_nobody_guesses_the_ids(federation):
    stock = federation(stock=True)
    assert stock.attacked(guessed) == honest(stock)
    assert stock.tries >= HONEST * MICROSECONDS


@pytest.mark.parametrize("keys", [False, True], ids=["without keys", "with keys"])
def test_to_a_stock_superlink_a_reply_counts_only_with_a_signature_where_keys_are_known(
    federation, keys
):
    """Without keys the attack succeeds: this is what Flower 1.32.1 does."""
    stock = federation(stock=True, keys=keys)
    values = stock.attacked(stock.given)
    mallory = stock.ids["mallory"]
    assert [phase.pop(mallory) for phase in values] == [1.0] * PHASES
    forged = dict.fromkeys((stock.ids[name] for name in stock.names[:HONEST]), -1.0)
    assert values == [{} if keys else forged] * PHASES


def test_where_keys_are_known_honest_replies_are_signed_and_count(federation):
    stock = federation(stock=True, keys=True)
    assert stock.attacked(lambda message, victim: ()) == honest(stock)
