"""The guard in the executor: what a hostile server or a changed app tries is stopped there."""

import datetime
import hashlib
import json
import logging
import tracemalloc
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import remove_content_from_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign, sign_message
from flwr.supercore.run import Run
from PIL import Image
from safetensors.numpy import save
from safetensors.torch import save as save_tensors
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.distill.packing import packed, unpacked
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.distill.virtual_overview import Overview
from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.executor import Executor
from flwr_distill.flower.guarding import Guarding
from flwr_distill.flower.payload import Payload
from flwr_distill.flower.task import Work
from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import VIRTUAL_DATA, Introduction
from flwr_distill.links.routes import Links
from flwr_distill.links.seal import sealed_size
from flwr_distill.links.transfer import introduce, send
from flwr_distill.node.codec import NodeCodec
from flwr_distill.node.events import Answer
from flwr_distill.node.guard import Guard
from flwr_distill.node.outbox import FOLDER, entries, virtual_data_file
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.parcels import to_payload
from flwr_distill.protocol.registry import find_method
from flwr_distill.protocol.replies import REFUSED
from flwr_distill.storage.store import CONTINUES, NodeStore
from flwr_distill.strategies.fedhead.method import HAND_IN
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL, VirtualTraining
from flwr_distill_baselines.common.passing.messages import PASSED_MODEL
from flwr_distill_baselines.fedseq.method import TURNS
from tests.apps import pyproject

SERVER, NODE, OTHER = 1, 5, 6
NODE_CONFIG: dict[str, Any] = {"data": "/data/ward-3", "name": "ward-3"}
PLANTED = b"a patient's record, all of it!"
PRIVATE = {"strategy": "fedavg", "train.dp-noise": 1.0, "train.dp-delta": 1e-5}
HFLDD = {"strategy": "hfldd", "hfldd.start": "noise", "train.dp-delta": 1e-5}
PRIVATE_FEDLGD = {
    "strategy": "fedlgd",
    "train.dp-delta": 1e-5,
    "fedlgd.dp-epsilon": 2.0,
    "fedlgd.refine-steps": 0,
}
SEALED = HOSPITAL.model_copy(
    update={
        "least_noise": 0.0,
        "most_epsilon": None,
        "fewest_of_a_class": 1,
        "real_per_virtual": 1,
    }
)
"""Looks at what leaves, without asking for differential privacy."""
UNCOUNTED = STANDARD.model_copy(update={"real_per_virtual": 1})
"""Asks for no real samples behind virtual ones: the node's data are not there here."""
MODEL = {"weight": np.zeros((3, 2), np.float32), "count": np.zeros((), np.float32)}


def model(**other: Any) -> ArrayRecord:
    return ArrayRecord({k: Array(np.asarray(a)) for k, a in {**MODEL, **other}.items()})


def metrics(**more: Any) -> MetricRecord:
    return MetricRecord({"num-examples": 10, "dp-epsilon": 1.0, "dp-delta": 1e-5} | more)


def trained(epsilon: float = 1.0, **records: Any) -> RecordDict:
    arrays = model(weight=np.ones((3, 2), np.float32), count=np.array(3, np.int64))
    return RecordDict({"arrays": arrays, "metrics": metrics(**{"dp-epsilon": epsilon})} | records)


def bundle(run_config: Mapping[str, Any]) -> Fab:
    """An app whose run config has these values."""
    lines = "".join(f"{json.dumps(key)} = {json.dumps(v)}\n" for key, v in run_config.items())
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr(zipfile.ZipInfo("pyproject.toml"), pyproject("app", lines))
    return Fab(hashlib.sha256(content.getvalue()).hexdigest(), content.getvalue(), {})


class _OfferedError(Exception):
    """The app would see the message."""


class Desk(Executor):
    """An executor without a child, whose tasks are given to it."""

    def _start_child(self, sandbox: Any) -> Any:
        return None

    def _run(self, *_: Any) -> Any:
        raise _OfferedError


class Given:
    """A task's objects, as a SuperNode has them."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def pull_contents(self, work: Work) -> dict[str, bytes]:
        return self.contents


class Node:
    """An executor with a guard; an app's replies are encoded as its worker does."""

    def __init__(self, policy: Policy, state_dir: Path, run_config: dict[str, Any]) -> None:
        self.state_dir, self.bundle = state_dir, bundle(run_config)
        self.now = datetime.datetime(2026, 1, 5, 12, tzinfo=datetime.UTC)
        self.read: list[bytes] = []
        self.guard = Guard(policy, state_dir, NODE_CONFIG, self.read_config, lambda: self.now)
        self.guarding = Guarding(self.guard)
        self.desk = Desk(None, [], self.guarding, NodeCodec(state_dir))
        self.context = Context(7, NODE, {}, RecordDict(), {})
        self.count = 0
        self.begin(7)

    def read_config(self, content: bytes, overrides: dict[str, Any]) -> dict[str, Any]:
        """Read a bundle's run config, and note it."""
        self.read.append(content)
        return run_config_of(content, overrides)

    def begin(self, run_id: int) -> None:
        """Let a run begin."""
        self.run = Run.create_empty(run_id)
        self.run_id = run_id
        self.run.fab_hash = self.bundle.hash_str

    def takes(self, content: RecordDict, message_type: str) -> Message | None:
        """Send a message; it, or None if the app never sees it."""
        self.count += 1
        content["pace"] = ConfigRecord({"poll-every": self.count / 1000})  # no two are the same
        message = Message(content, NODE, message_type)
        message.metadata.__dict__.update(_run_id=self.run_id, _src_node_id=SERVER)
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = get_all_nested_objects(message)
        contents = {name: part.deflate() for name, part in objects.items()}
        return message if self.offers(message, get_object_tree(message), contents) else None

    def offers(self, header: Message, tree: ObjectTree, contents: dict[str, bytes]) -> bool:
        """Let the executor take a message; whether the app sees it."""
        header = remove_content_from_message(header)
        work = Work(header, tree, self.context, self.run, self.bundle, 1)
        given: Any = Given(contents)
        try:
            refusal, num_bytes = self.desk._reply(given, work)
        except _OfferedError:
            return True
        self._leaves(refusal, num_bytes)
        return False

    def _leaves(self, reply: Message, num_bytes: int) -> None:
        self.arrived = self.guarding.release(reply, num_bytes)
        objects = get_all_nested_objects(self.arrived).values()
        self.bytes = repr(self.arrived).encode() + b"".join(part.deflate() for part in objects)

    def sends(self, reply: Message) -> Message:
        """Have the app send a reply; what the SuperLink gets."""
        payload = Payload.from_parts(Payload.of(reply, self.context).parts())
        self._leaves(payload.message(), payload.num_bytes)
        return self.arrived

    def answers(self, content: RecordDict, message_type: str, reply: RecordDict) -> Message:
        """Send a message, have the app reply, and return what the SuperLink gets."""
        if (message := self.takes(content, message_type)) is not None:
            return self.sends(Message(reply, reply_to=message))
        return self.arrived

    def trains(self, reply: RecordDict | None = None, **config: Any) -> Message:
        """Send a message to train, have the app reply, and return what the SuperLink gets."""
        return self.answers(train_message(**config), "train", trained() if reply is None else reply)

    def working(self) -> Message:
        """A message to train that the app works on."""
        message = self.takes(train_message(), "train")
        assert message is not None
        return message

    def describes(self, config: Mapping[str, Any], **records: Any) -> ConfigRecord:
        """What the SuperLink learns of a node at the first meeting, as its app says."""
        numbers = MetricRecord({"num-examples": 10})
        reply = RecordDict({"metrics": numbers, "config": ConfigRecord(dict(config)), **records})
        answer = self.answers(RecordDict(), "query.describe", reply)
        return answer.content.config_records["config"]

    def log(self) -> list[dict[str, Any]]:
        return list(entries(self.state_dir / FOLDER))


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    monkeypatch.setattr("os.fsync", lambda number: None)  # a busy disk takes its time

    def make(policy: Policy = HOSPITAL, **run_config: Any) -> Node:
        config = {name.replace("__", "."): value for name, value in run_config.items()}
        return Node(policy, tmp_path, config or PRIVATE)

    return make


def train_message(**config: Any) -> RecordDict:
    return RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1} | config)})


def check(answer: Message | None, rule: str) -> None:
    """Check that a rule refuses a message or a reply; '' for none."""
    assert answer is not None
    if not rule:
        assert answer.has_content(), answer.error
        return
    assert answer.has_error(), answer
    assert answer.error.code == REFUSED, answer.error
    assert str(answer.error.reason).startswith(f"the node's policy refuses it: {rule}: ")


def test_a_model_with_noise_leaves_and_is_in_the_outbox_first(make_node: MakeNode) -> None:
    node = make_node()
    settings = {"dp-noise": 1.0, "dp-delta": 1e-5, "dp-epsilon": 0.0, "local-epochs": 2}
    answer = node.trains(trained(2.0), **settings)
    weight = answer.content.array_records["arrays"]["weight"].numpy()
    np.testing.assert_array_equal(weight, np.ones((3, 2)))
    assert (answer.metadata.dst_node_id, answer.metadata.run_id) == (SERVER, 7)
    (line,) = node.log()
    assert (line["strategy"], line["type"], line["data"]) == ("fedavg", "train", "/data/ward-3")
    assert (line["epsilon"], line["lifetime"]) == (2.0, 2.0)
    assert line["what"][0] == "arrays: 2 arrays, 7 values"


@pytest.mark.parametrize(
    ("run_config", "config", "rule"),
    [
        ({"strategy": "fedavg"}, {}, "least-noise"),
        ({**PRIVATE, "train.dp-noise": 0.9}, {}, "least-noise"),
        (PRIVATE, {"dp-noise": 0.0}, "least-noise"),
        (PRIVATE, {"dp-noise": "lots"}, "least-noise"),
        ({**PRIVATE, "train.dp-delta": 0.1}, {}, "most-delta"),
        ({**PRIVATE, "train.local-epochs": 11}, {}, "most-epochs"),
        (PRIVATE, {"local-epochs": 1e9}, "most-epochs"),
        ({**PRIVATE, "strategy": "fedaf"}, {}, "strategies"),
        ({**PRIVATE, "strategy": "fedlgd"}, {}, "least-noise"),
        (PRIVATE_FEDLGD, {}, "least-noise"),  # plain training, on the samples
        ({**PRIVATE, "strategy": "their_pkg:Theirs"}, {}, "strategies"),
        ({**PRIVATE, "strategy": "hfldd", "hfldd.share-raw-data": True}, {}, "raw-data"),
        ({**HFLDD, "train.dp-noise": 1.0}, {}, "least-noise"),
        ({**PRIVATE, "strategy": "hfldd"}, {}, "starts"),
        ({**PRIVATE, "strategy": "hfldd", "strategy-args": '{"start": "real"}'}, {}, "starts"),
        (PRIVATE, {"share-raw-data": True}, "raw-data"),
        (PRIVATE, {"dp-epsilon": 0.0}, "least-noise"),  # as in a request to distil
        (PRIVATE, {"start": "real"}, "starts"),
    ],
)
def test_the_app_never_sees_a_message_that_the_policy_refuses(
    run_config: dict[str, Any], config: dict[str, Any], rule: str, make_node: MakeNode
) -> None:
    node = make_node(**{name.replace(".", "__"): value for name, value in run_config.items()})
    assert node.takes(train_message(**config), "train") is None
    check(node.arrived, rule)
    assert rule in node.log()[0]["error"]


def test_at_the_first_meeting_a_node_that_refuses_says_its_name_too(make_node: MakeNode) -> None:
    node = make_node(strategy="fedavg")
    assert node.takes(RecordDict(), "query.describe") is None
    answer = node.arrived
    assert answer
    config = answer.content.config_records["config"]
    assert config["name"] == "ward-3"
    assert "least-noise" in config["missing"][0]
    assert answer.content.metric_records["metrics"] == {"num-examples": 0}
    assert "least-noise" in node.log()[0]["error"]


def test_what_the_server_says_of_a_node_is_for_its_log_alone(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    node = make_node()
    said = ConfigRecord({"texts": ["another node has the name ward"]})
    # The guard refuses records that a message does not declare, so it does not see this one.
    check(node.answers(RecordDict({**train_message(), "notice": said}), "train", trained()), "")
    assert "the server says: another node has the name ward" in caplog.text
    for forged in (["two\nlines"], ["long" * 100], ["many"] * 9, [7]):
        notice = ConfigRecord({"texts": forged})
        answer = node.answers(RecordDict({**train_message(), "notice": notice}), "train", trained())
        assert answer.has_error()


def test_a_message_type_of_another_strategy_is_refused(make_node: MakeNode) -> None:
    assert make_node().takes(train_message(), "train.distill") is None


def test_only_the_bundles_that_the_owner_knows_are_run(make_node: MakeNode) -> None:
    known = bundle(PRIVATE).hash_str
    check(make_node(HOSPITAL.model_copy(update={"bundles": [known]})).trains(), "")
    answer = make_node(HOSPITAL.model_copy(update={"bundles": ["0" * 64]})).trains()
    check(answer, "bundles")
    assert known in str(answer.error.reason)  # so that the owner can add it


def signed(app: Fab, key: Ed25519PrivateKey, name: str = "hub") -> Fab:
    """A bundle with a publisher's signature, as the SuperLink hands it on."""
    digest = hashlib.sha256(app.content).digest()
    signature = sign_message(key, create_message_to_sign(digest, 5))
    words = {"signed_at": 5, "signature": urlsafe_b64encode(signature).decode()}
    return Fab(app.hash_str, app.content, {"valid_license": "Valid", name: json.dumps(words)})


def test_only_bundles_that_a_trusted_publisher_has_signed_are_run(make_node: MakeNode) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    known = bundle(PRIVATE)
    changed = bundle({**PRIVATE, "seed": 7})
    node = make_node(HOSPITAL.model_copy(update={"publishers": {"hub": public}}))
    for given, rule in (
        (signed(known, key), ""),
        (signed(known, other), "publishers"),
        (signed(known, key, "another"), "publishers"),
        (Fab(changed.hash_str, changed.content, signed(known, key).verifications), "publishers"),
        (Fab(known.hash_str, known.content, {"hub": "[" * 9}), "publishers"),
        (known, "publishers"),
    ):
        node.bundle = given
        node.begin(node.run_id + 1)
        check(node.trains(), rule)
    assert f"{known.hash_str} is signed by none of hub" in node.log()[-1]["error"]


def test_outside_its_hours_a_node_does_nothing(make_node: MakeNode) -> None:
    node = make_node(HOSPITAL.model_copy(update={"hours": "20:00-06:00"}))
    check(node.trains(), "hours")
    node.now = node.now.replace(hour=23)
    check(node.trains(), "")


def padded(array: Array) -> Array:
    """An array whose bytes hold more than NumPy reads."""
    return Array(array.dtype, tuple(array.shape), array.stype, array.data + PLANTED)


@pytest.mark.parametrize(
    ("reply", "rule"),
    [
        (trained(**{"patients": ConfigRecord({"them": PLANTED})}), "replies"),
        (trained(**{"metrics": metrics(**{PLANTED.decode(): 170.0})}), "replies"),
        (trained(**{"metrics": metrics(**{"num-steps": [1, 2, 3]})}), "replies"),
        (trained(**{"arrays": model(**{PLANTED.decode(): np.zeros(9)})}), "replies"),
        (trained(**{"arrays": model(weight=np.zeros((28, 28), np.float32))}), "replies"),
        (trained(**{"arrays": model(weight=np.zeros((3, 2), np.float64))}), "replies"),
        (trained(**{"images": model()}), "replies"),
        (RecordDict({"metrics": metrics()}), "replies"),
        (
            RecordDict({"arrays": model(), "metrics": MetricRecord({"num-examples": 3})}),
            "most-epsilon",
        ),
    ],
)
def test_a_changed_app_cannot_send_data_in_another_record_metric_or_array(
    reply: RecordDict, rule: str, make_node: MakeNode
) -> None:
    node = make_node()
    check(node.trains(reply), rule)
    assert PLANTED not in node.bytes  # nor in what the refusal says


def test_what_a_changed_app_puts_beside_a_reply_does_not_leave(make_node: MakeNode) -> None:
    node = make_node()
    content = trained()
    content.array_records["arrays"]["weight"] = padded(content.array_records["arrays"]["weight"])
    reply = Message(content, reply_to=node.working())
    reply.metadata.__dict__["_group_id"] = PLANTED.decode()  # a text that the server would get
    check(node.sends(reply), "")
    assert PLANTED not in node.bytes


def test_objects_that_belong_to_no_reply_do_not_leave_with_it(make_node: MakeNode) -> None:
    node = make_node()
    payload = Payload.of(Message(trained(), reply_to=node.working()), node.context)
    stray = ConfigRecord({"them": PLANTED}).deflate()
    contents = {**payload.contents, get_object_id(stray): stray}
    node._leaves(replace(payload, contents=contents).message(), payload.num_bytes)
    check(node.arrived, "")
    assert PLANTED not in node.bytes


def test_a_message_is_answered_once_and_an_errors_text_is_cut(make_node: MakeNode) -> None:
    node = make_node()
    message = node.working()
    answer = node.sends(Message(Error(20, "x" * 10_000 + PLANTED.decode()), reply_to=message))
    assert (answer.error.code, len(str(answer.error.reason))) == (20, 300)
    assert PLANTED not in node.bytes
    with pytest.raises(LookupError):
        node.sends(Message(trained(), reply_to=message))
    with pytest.raises(LookupError):
        node.guard.release(message.metadata.message_id, Answer(trained()), 10)


def test_lifetime_epsilon_outlasts_runs_and_restarts_and_ends_the_nodes_part(
    make_node: MakeNode,
) -> None:
    node = make_node()
    check(node.trains(trained(4.0)), "")
    check(node.trains(trained(6.0)), "")
    node = make_node()  # after a restart
    node.begin(8)
    check(node.trains(trained(3.0)), "")
    check(node.trains(trained(4.5)), "most-epsilon")
    assert [line.get("lifetime") for line in node.log()] == [4.0, 6.0, 9.0, None]
    check(node.trains(trained(4.0)), "")
    node.begin(9)
    check(node.trains(trained(0.0)), "")  # spent, not above
    check(node.trains(trained(1e-9)), "most-epsilon")


def test_a_resumed_run_goes_on_with_the_epsilon_of_the_one_before(make_node: MakeNode) -> None:
    node = make_node()
    node.trains(trained(4.0))
    node.begin(8)
    NodeStore.open(node.state_dir, 8, NODE).take_over("7", str(NODE), 1)
    node.trains(trained(5.0))
    assert node.log()[-1]["lifetime"] == 5.0


def test_a_run_whose_account_restarts_adds_all_of_it(make_node: MakeNode) -> None:
    node = make_node()
    for claim in (4.0, 1.0, 1.5):
        check(node.trains(trained(claim)), "")
    assert [line["lifetime"] for line in node.log()] == [4.0, 5.0, 5.5]


@pytest.mark.parametrize("claim", [-1.0, float("nan")])
def test_an_app_that_makes_epsilon_up_sends_nothing(claim: float, make_node: MakeNode) -> None:
    assert make_node().trains(trained(claim)).has_error()


def virtual_training(epsilon: float = 2.0) -> RecordDict:
    """FedLGD's message."""
    request = VirtualTraining(per_class=1, first_steps=1, gradient=["weight"], dp_epsilon=epsilon)
    content = train_message()
    content["virtual"] = ConfigRecord(request.model_dump(by_alias=True))
    return content


def test_private_virtual_data_pass_without_noise_in_training_and_are_booked_once(
    make_node: MakeNode,
) -> None:
    node = make_node(**PRIVATE_FEDLGD)

    def training(reply: RecordDict, rule: str) -> None:
        check(node.answers(virtual_training(), TRAIN_VIRTUAL, reply), rule)

    assert node.takes(RecordDict(), "query.describe")
    node.guard._pending.clear()
    gradient = ArrayRecord({"weight": Array(np.ones((3, 2), np.float32))})
    for _ in range(3):
        training(trained(1.99, gradient=gradient), "")
    assert node.log()[-1]["lifetime"] == 1.99
    training(trained(1.99, samples=model()), "replies")
    for run in range(8, 12):
        node.begin(run)
        training(trained(1.99), "")
    node.begin(12)
    training(trained(1.99), "most-epsilon")


def test_private_virtual_data_that_do_not_say_their_epsilon_stay(make_node: MakeNode) -> None:
    node = make_node(**PRIVATE_FEDLGD)
    silent = RecordDict({"arrays": model(), "metrics": MetricRecord({"num-examples": 10})})
    for reply in (silent, trained(11.0)):
        check(node.answers(virtual_training(), TRAIN_VIRTUAL, reply), "most-epsilon")
    # Nor do those for which a server that promises an epsilon asks without one.
    check(node.answers(virtual_training(0.0), TRAIN_VIRTUAL, trained()), "least-noise")


def test_a_damaged_account_is_not_an_empty_one(make_node: MakeNode) -> None:
    node = make_node()
    (node.state_dir / "lifetime-epsilon.json").write_text("")
    assert node.takes(train_message(), "train") is None


def test_no_more_leaves_in_a_day_than_the_owner_lets(make_node: MakeNode) -> None:
    node = make_node(HOSPITAL.model_copy(update={"most_bytes_a_day": 3000}))
    answers = [node.trains() for _ in range(10)]
    sent = sum(answer.has_content() for answer in answers)
    assert 0 < sent < 10
    for answer in answers[sent:]:
        check(answer, "most-bytes-a-day")
    assert sum(line["bytes"] for line in node.log()[:sent]) <= 3000
    node.now += datetime.timedelta(days=1, seconds=1)
    check(node.trains(), "")


class Sender:
    """A node's links, as its app uses them."""

    run_id, node_id, node_config = 7, NODE, dict[str, object]()

    def __init__(self, state_dir: Path, node_id: int = NODE) -> None:
        self.node_id = node_id
        self.store = NodeStore.open(state_dir, self.run_id, node_id)


def virtual(method: str = "dm", init: str = "noise") -> bytes:
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    return VirtualData(images, labels, method, 1, 0, init).to_bytes()


def parcel_of(
    node: Node,
    payload: bytes,
    purpose: str = VIRTUAL_DATA,
    largest: int | None = None,
    dp_epsilon: float = 0.0,
) -> tuple[RecordDict, RecordDict]:
    """The message with a route to another node, and the reply with the parcel."""
    receiver = Sender(node.state_dir / "other", OTHER)
    links = Links({OTHER: Introduction.checked(introduce(receiver), "introduction")}, "relay")
    route = links.route(NODE, OTHER, purpose, largest)
    parcel = send(Sender(node.state_dir), route, payload)
    numbers = MetricRecord({"num-examples": 2, "num-values": 128})
    config = ConfigRecord({"start": "noise", "share-raw-data": False, "dp-epsilon": dp_epsilon})
    message = RecordDict({"route": route, "config": config})
    return message, RecordDict({"parcel": parcel, "metrics": numbers})


def distils(node: Node, payload: bytes, rule: str, **parcel: Any) -> None:
    """Have a node send virtual data to another, and check which rule refuses them."""
    message, reply = parcel_of(node, payload, **parcel)
    check(node.answers(message, "train.distill", reply), rule)


def distils_for_server(node: Node, payload: bytes, rule: str) -> None:
    reply = RecordDict({VIRTUAL_DATA: ConfigRecord({"payload": payload})})
    check(node.answers(train_message(), "train.feddm_distill", reply), rule)


def test_virtual_data_that_left_sealed_are_in_the_outbox_to_look_at(make_node: MakeNode) -> None:
    node, payload = make_node(SEALED, **HFLDD), virtual()
    distils(node, payload, "")
    (line,) = node.log()
    (name,) = line["virtual"]
    assert virtual_data_file(node.state_dir / FOLDER, name).read_bytes() == payload
    (parcel,) = line["parcels"]
    size = sealed_size(len(payload), VIRTUAL_DATA)
    known = {"to": str(OTHER), "purpose": VIRTUAL_DATA, "link": "relay", "bytes": size}
    assert parcel == known
    assert line["title"] == "members distil their data"


def test_a_parcel_is_decoded_once(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    read, decoded = Overview.of, list[int]()

    def count(payload: bytes, most: int) -> Overview:
        decoded.append(len(payload))
        return read(payload, most)

    monkeypatch.setattr(Overview, "of", count)
    policy = SEALED.model_copy(update={"real_per_virtual": 50, "classes": ["a", "b"]})
    node = make_node(policy, **HFLDD)
    monkeypatch.setattr(node.guard._data, "counts", lambda: [50, 50])
    distils(node, virtual(), "")
    assert len(decoded) == 1


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ({"dataset": "private", "private__classes": "cat,dog"}, ["cat", "dog"]),
        ({"private__classes": "cat,dog"}, []),  # of a named data set
        ({"dataset": "private", "private__classes": ",".join(map(str, range(999)))}, 100),
    ],
)
def test_virtual_data_in_the_outbox_have_the_names_of_their_classes_as_far_as_known(
    make_node: MakeNode, run: dict[str, str], names: list[str] | int
) -> None:
    node = make_node(SEALED, **HFLDD, **run)
    distils(node, virtual(), "")
    (line,) = node.log()
    assert (line["classes"] if isinstance(names, list) else len(line["classes"])) == names


def test_what_the_outbox_keeps_is_bounded_and_beyond_it_nothing_leaves(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = virtual()
    monkeypatch.setattr("flwr_distill.node.outbox.MAX_KEPT", len(first) + 1)
    node = make_node(SEALED, **HFLDD)
    for payload, rule in ((first, ""), (first, ""), (virtual(), "outbox")):
        distils(node, payload, rule)


def test_a_bundle_that_changes_during_a_run_is_refused(make_node: MakeNode) -> None:
    """What was read first was cached, and the hash of what came later was not checked."""
    node = make_node()
    check(node.trains(), "")
    node.bundle = Fab(node.bundle.hash_str, bundle({**PRIVATE, "train.lr": 9.0}).content, {})
    assert node.takes(train_message(), "train") is None
    check(node.arrived, "bundle")


def test_no_text_of_a_message_or_an_app_makes_a_line_of_the_outbox_long(
    make_node: MakeNode,
) -> None:
    """The strategy's name had all its characters there, again with each message."""
    node, long = make_node(OPEN, strategy="x" * 50_000), "y" * 50_000
    route = ConfigRecord({"receiver": long, "purpose": long})
    parcel = ConfigRecord({"link": long, "num-bytes": long})
    message, reply = RecordDict({"route": route}), RecordDict({"parcel": parcel})
    check(node.answers(message, f"train.{long}", reply), "")
    (line,) = node.log()
    assert len(json.dumps(line)) < 5000


@pytest.mark.parametrize(
    ("policy", "payload", "rule"),
    [
        (SEALED, virtual(method="raw"), "raw-data"),
        (Policy(raw_data="never"), virtual(method="raw"), "raw-data"),
        (SEALED, virtual(init="real"), "starts"),
        (SEALED, PLANTED, "replies"),
    ],
)
def test_a_parcel_is_opened_before_it_leaves(
    policy: Policy, payload: bytes, rule: str, make_node: MakeNode
) -> None:
    distils(make_node(policy, **HFLDD), payload, rule)


def test_an_owner_who_is_asked_allows_one_run_and_no_other_that_an_app_says_goes_on_with_it(
    make_node: MakeNode,
) -> None:
    node = make_node(Policy(raw_data="ask"), **HFLDD, **{"hfldd.share-raw-data": True})
    message, reply = parcel_of(node, virtual(method="raw"))
    answer = node.answers(message, "train.distill", reply)
    check(answer, "raw-data")
    assert "flwr-distill policy allow RUN" in str(answer.error.reason)
    allowed = CliRunner().invoke(app, ["policy", "allow", "7", "--state-dir", str(node.state_dir)])
    assert allowed.exit_code == 0, allowed.output
    distils(node, virtual(method="raw"), "")
    node.begin(8)
    distils(node, virtual(method="raw"), "raw-data")
    NodeStore.open(node.state_dir, 8, NODE).write(CONTINUES, f"7/{NODE}".encode())
    distils(node, virtual(method="raw"), "raw-data")


@pytest.fixture
def with_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Give the node a table with samples of two classes."""

    def write(first: int, second: int) -> None:
        table = tmp_path / "ward.csv"
        table.write_text("height,label\n" + "1.7,a\n" * first + "1.8,b\n" * second)
        monkeypatch.setitem(NODE_CONFIG, "data", str(table))

    return write


def test_virtual_data_show_no_more_classes_than_are_large_enough(
    make_node: MakeNode, with_samples: Callable[[int, int], None]
) -> None:
    """The node counts its samples itself: it does not believe the app."""
    fewest = HOSPITAL.fewest_of_a_class
    policy = SEALED.model_copy(update={"fewest_of_a_class": fewest})
    for small, rule in ((fewest - 1, "fewest-of-a-class"), (fewest, "")):
        with_samples(30, small)
        distils(make_node(policy, **HFLDD), virtual(), rule)
        uncounted = Policy(fewest_of_a_class=fewest, real_per_virtual=1)
        distils_for_server(make_node(uncounted, strategy="feddm"), virtual(), rule)


@pytest.mark.parametrize(
    ("samples", "epsilon", "rule"),
    [((99, 49), 0.0, "real-per-virtual"), ((50, 50), 0.0, ""), ((1, 1), 1.0, "")],
)
def test_behind_each_virtual_image_without_privacy_are_enough_real_ones(
    samples: tuple[int, int],
    epsilon: float,
    rule: str,
    make_node: MakeNode,
    with_samples: Callable[[int, int], None],
) -> None:
    """One virtual image of each class: of few real ones attacks find most (docs/privacy.md)."""
    with_samples(*samples)
    distils(make_node(STANDARD, **HFLDD), virtual(), rule, dp_epsilon=epsilon)


def test_however_many_real_images_there_are_none_by_kip_leave(
    make_node: MakeNode, with_samples: Callable[[int, int], None]
) -> None:
    with_samples(1000, 1000)
    for policy, rule in ((UNCOUNTED, ""), (STANDARD, "real-per-virtual")):
        for run in (HFLDD, {**HFLDD, "hfldd.distiller": "kip"}):
            distils(make_node(policy, **run), virtual(method="kip"), rule)


def test_virtual_images_of_a_run_add_up_and_the_same_ones_count_once(
    make_node: MakeNode, with_samples: Callable[[int, int], None]
) -> None:
    with_samples(*2 * [2 * STANDARD.real_per_virtual - 1])
    node, first, second = make_node(STANDARD, **HFLDD), virtual(), virtual()
    for payload, epsilon, rule in (
        (first, 0.0, ""),
        (first, 0.0, ""),
        (second, 1.0, ""),
        (second, 0.0, "real-per-virtual"),
    ):
        distils(node, payload, rule, dp_epsilon=epsilon)


def test_virtual_data_show_no_more_classes_than_the_owner_names(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the node's data hold, which are not there here."""
    monkeypatch.setitem(NODE_CONFIG, "data", str(tmp_path / "missing"))
    for names, rule in ((["a"], "classes"), (["a", "b"], "")):  # virtual data are of two
        distils(make_node(Policy(classes=names, real_per_virtual=1), **HFLDD), virtual(), rule)


def of_zeros(num_bytes: int) -> bytes:
    """Virtual data of black images, which are small until they are unpacked."""
    side = 2**10
    pixels = torch.zeros(num_bytes // side**2, 1, side, side, dtype=torch.uint8)
    labels = torch.zeros(len(pixels), dtype=torch.int16)
    content = unpacked(virtual(), 2**20)
    size = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["about"])
    about["scale"], about["offset"] = 1.0, 0.0
    metadata = {"about": json.dumps(about)}
    return packed(save_tensors({"pixels": pixels, "labels": labels}, metadata=metadata))


@pytest.mark.parametrize("strategy", ["hfldd", "feddm"])
def test_virtual_data_of_any_size_are_judged_in_little_memory(
    strategy: str, make_node: MakeNode
) -> None:
    """Some KB of them had a guard unpack 1 GB, and decode that to four."""
    size = 2**25
    payload = of_zeros(size)
    assert len(payload) < size / 1000
    node = make_node(UNCOUNTED, **HFLDD | {"strategy": strategy})
    tracemalloc.start()
    (distils if strategy == "hfldd" else distils_for_server)(node, payload, "")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2


@pytest.mark.parametrize(
    ("largest", "rule"), [(2**22 + 2**16, ""), (2**20, "replies"), (50, "replies")]
)
def test_virtual_data_are_no_larger_than_their_route_says(
    largest: int, rule: str, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sealed nor unpacked."""
    node = make_node(UNCOUNTED, **HFLDD)
    with monkeypatch.context() as changed_app:
        changed_app.setattr("flwr_distill.links.records.Waybill.check_size", lambda *_: None)
        message, reply = parcel_of(node, of_zeros(2**22), largest=largest)
    check(node.answers(message, "train.distill", reply), rule)


def test_a_second_record_hides_nothing_of_the_one_that_counts(make_node: MakeNode) -> None:
    node = make_node()
    message = train_message(**{"dp-epsilon": 0.0})
    message["other"] = ConfigRecord({"dp-epsilon": 5.0, "dp-noise": 1.0})
    assert node.takes(message, "train") is None


@pytest.mark.parametrize("policy", [SEALED, STANDARD])
def test_a_parcel_that_another_key_seals_does_not_leave(
    policy: Policy, make_node: MakeNode
) -> None:
    node = make_node(policy, **HFLDD)
    message, reply = parcel_of(node, virtual())
    reply.config_records["parcel"]["payload"] = PLANTED * 10
    check(node.answers(message, "train.distill", reply), "replies")
    message, _ = parcel_of(node, virtual())
    _, reply = parcel_of(node, virtual())  # for another route
    check(node.answers(message, "train.distill", reply), "replies")


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (save(MODEL), ""),
        (PLANTED, "replies"),
        (save({**MODEL, "weight": np.zeros((9, 9), np.float32)}), "replies"),
        (save({**MODEL, "patients": np.zeros(9, np.float32)}), "replies"),
        (save(MODEL, metadata={"patients": PLANTED.decode()}), "replies"),
    ],
)
def test_a_model_for_another_node_is_the_runs_and_holds_nothing_else(
    payload: bytes, rule: str, make_node: MakeNode
) -> None:
    node = make_node(SEALED.model_copy(update={"strategies": None}), strategy="fedseq")
    message, reply = parcel_of(node, payload, PASSED_MODEL)
    del message["config"]
    message["arrays"] = model()
    reply["metrics"] = MetricRecord({"num-examples": 3, "num-steps": 1})
    check(node.answers(message, TURNS.in_turn, reply), rule)


LARGE = {"weight": np.linspace(-1, 1, 900, dtype=np.float32).reshape(30, 30)}


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (to_payload({**MODEL, **LARGE}, "delta-int4", {**MODEL, **LARGE}), ""),
        (to_payload({**MODEL, **LARGE}, "float16"), ""),
        (to_payload({**MODEL, **LARGE}, "float16") + b"x", "replies"),
        (to_payload({**MODEL, "weight": LARGE["weight"][:20]}, "float16"), "replies"),
        (to_payload({**MODEL, **LARGE, "patients": LARGE["weight"]}, "float16"), "replies"),
        (
            to_payload({**MODEL, "weight": np.full((30, 30), np.inf, np.float32)}, "float16"),
            "replies",
        ),
    ],
    ids=["difference", "whole", "more bytes", "another shape", "more arrays", "infinite"],
)
def test_a_coded_model_for_another_node_is_judged_as_a_plain_one_is(
    payload: bytes, rule: str, make_node: MakeNode
) -> None:
    node = make_node(SEALED.model_copy(update={"strategies": None}), strategy="fedseq")
    message, reply = parcel_of(node, payload, PASSED_MODEL)
    message["config"] = ConfigRecord({"server-round": 1})
    message["arrays"] = model(**LARGE)
    message["parcel-codec"] = ConfigRecord({"codec": "float16"})
    reply["metrics"] = MetricRecord({"num-examples": 3, "num-steps": 1})
    check(node.answers(message, TURNS.in_turn, reply), rule)


def test_a_receipt_of_a_parcel_that_went_past_the_node_does_not_leave(make_node: MakeNode) -> None:
    node = make_node(SEALED, **HFLDD)
    message, reply = parcel_of(node, virtual())
    reply.config_records["parcel"].update({"link": "direct", "payload": b""})
    check(node.answers(message, "train.distill", reply), "replies")
    assert node.log()[0]["bytes"] < 500  # of the refusal alone


def test_a_parcel_for_a_key_that_no_authority_signed_does_not_leave(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app checks that too, but one that was changed does not."""

    class Strict:
        certificate = b""

        def check_peer(self, *route: object) -> None:
            raise LinkError("its key is not signed")

    node = make_node(SEALED, **HFLDD)
    message, reply = parcel_of(node, virtual())
    monkeypatch.setattr("flwr_distill.node.parcels.Credentials.of", lambda node_config: Strict())
    check(node.answers(message, "train.distill", reply), "replies")


def test_a_node_knows_the_model_from_the_one_that_another_node_sent_it(
    make_node: MakeNode,
) -> None:
    """The head of a cluster of FedSeq gets no model from the server, and sends one there."""
    node = make_node(SEALED.model_copy(update={"strategies": None}), strategy="fedseq")
    other = Sender(node.state_dir / "other", OTHER)
    introductions = {
        name: Introduction.checked(introduce(sender), "introduction")
        for name, sender in ((OTHER, other), (NODE, Sender(node.state_dir)))
    }
    links = Links(introductions, "relay")
    route = links.route(OTHER, NODE, "passed-model")
    delivery = links.forward(route, send(other, route, save(MODEL)))
    numbers = MetricRecord({"num-examples": 3, "num-steps": 1})
    for arrays, rule in ((model(), ""), (model(weight=np.zeros((9, 9))), "replies")):
        reply = RecordDict({"arrays": arrays, "metrics": numbers})
        content = RecordDict({"delivery": delivery})
        check(node.answers(content, "train.fedseq_last", reply), rule)


def test_a_route_past_the_node_is_refused_before_the_app_can_take_it(make_node: MakeNode) -> None:
    node = make_node(SEALED, **HFLDD)
    message, _ = parcel_of(node, virtual())
    message.config_records["route"].update({"link": "auto", "address": "127.0.0.1:1"})
    assert node.takes(message, "train.distill") is None


@pytest.mark.parametrize(
    ("payload", "rule"),
    [(virtual(), ""), (virtual(method="raw"), "raw-data"), (virtual(init="real"), "starts")],
)
def test_virtual_data_for_the_server_are_judged_too(
    payload: bytes, rule: str, make_node: MakeNode
) -> None:
    distils_for_server(make_node(UNCOUNTED, strategy="feddm"), payload, rule)


def test_other_bytes_of_a_plug_in_are_not_taken_for_virtual_data(make_node: MakeNode) -> None:
    node = make_node(STANDARD, strategy="fedavg")
    check(node.trains(trained(them=ConfigRecord({"payload": b"a sketch of some kind"}))), "")
    assert node.log()[0]["virtual"] == []


@pytest.mark.parametrize("blob", [b"a sketch", [b"a", b"sketch"]])
def test_bytes_that_do_not_say_what_they_cost_stay_where_epsilon_is_bounded(
    blob: Any, make_node: MakeNode
) -> None:
    node = make_node(STANDARD.model_copy(update={"most_epsilon": 10.0}), strategy="fedavg")
    check(node.trains(RecordDict({"them": ConfigRecord({"blob": blob})})), "most-epsilon")


def test_the_open_policy_lets_everything_pass_and_writes_it_down(make_node: MakeNode) -> None:
    node = make_node(OPEN, anything="goes")
    reply = RecordDict({"them": ConfigRecord({"payload": PLANTED})})
    answer = node.answers(RecordDict(), "query.anything", reply)
    assert answer.content == reply
    assert node.log()[0]["what"] == ["them: payload"]


def test_what_cannot_be_written_down_does_not_leave(make_node: MakeNode) -> None:
    node = make_node(OPEN)
    message = node.working()
    (node.state_dir / FOLDER / "log.jsonl").mkdir(parents=True)
    check(node.sends(Message(trained(), reply_to=message)), "outbox")


def test_a_run_is_read_once_and_its_method_looked_up_once_a_message(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either takes milliseconds, which every message would wait for."""
    looked_up = list[str]()

    def find(name: str) -> Method | None:
        looked_up.append(name)
        return find_method(name)

    monkeypatch.setattr("flwr_distill.node.requests.find_method", find)
    node = make_node(SEALED, **PRIVATE)
    for run_id in (7, 7, 8):
        if run_id != node.run_id:
            node.begin(run_id)
        check(node.trains(), "")
    assert looked_up == ["fedavg"] * 3
    assert len(node.read) == 2  # of runs 7 and 8


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"name": "a patient's name"},
        {"dataset": "another"},
        {"class-names": ["a", "patient's", "record"]},
        {"class-names": ["1", "0"]},
        {"classes": [3, 1, 2]},
        {"classes": [1, 1]},
    ],
    ids=lambda lie: str(next(iter(lie), "honest")),
)
def test_what_a_node_says_of_itself_is_what_its_owner_knows(
    lie: dict[str, Any], make_node: MakeNode
) -> None:
    """These are free texts and numbers, which an app could fill with samples."""
    honest = {"name": "ward-3", "classes": [0, 1, 5], "class-names": ["0", "1", "2"]}
    config = make_node(SEALED, **PRIVATE).describes({**honest, **lie})
    assert ("missing" in config) == bool(lie)


@pytest.mark.parametrize("lie", [{"certificate": PLANTED}, {"address": "192.0.2.1:80"}])
def test_a_node_introduces_itself_with_its_own_certificate_and_address(
    lie: dict[str, Any], make_node: MakeNode
) -> None:
    introduction = ConfigRecord({"public-key": b"k" * 32, **lie})
    config = make_node(SEALED, **PRIVATE).describes({}, introduction=introduction)
    assert "replies" in str(config["missing"])


def test_labels_are_not_told_where_the_owner_asks_for_differential_privacy(
    make_node: MakeNode,
) -> None:
    node = make_node()
    assert "missing" not in node.describes({"name": "ward-3"})
    assert "missing" in node.describes({"name": "ward-3", "classes": [0, 1, 5]})


def test_what_an_app_says_is_missing_counts_as_its_errors_do(make_node: MakeNode) -> None:
    node, left = make_node(SEALED, **PRIVATE), ""
    for number in range(30):
        texts = [f"{number} {place} " + "x" * 250 for place in range(8)]
        missing: Any = node.describes({"name": "ward-3", "missing": texts})["missing"]
        left += " ".join(missing)
    assert 0 < left.count("x" * 250) <= 40
    assert left.endswith("(the node's log says why)")


def test_why_a_parcel_was_not_sent_counts_as_an_error_does(make_node: MakeNode) -> None:
    """It had 2,000 characters of the app's in each message, and no bound over a day."""
    node, left = make_node(Policy(replies="declared"), strategy="fedhead"), ""
    for number in range(60):
        report = RecordDict({"config": ConfigRecord({"link-error": f"{number} " + "x" * 1900})})
        answer = node.answers(RecordDict(), HAND_IN, report)
        left += str(answer.content.config_records["config"]["link-error"])
    assert 0 < left.count("x") <= 10_000
    assert left.endswith("(the node's log says why)")


def test_an_apps_errors_are_bounded_over_a_day(make_node: MakeNode) -> None:
    node = make_node(SEALED, **PRIVATE)

    def failing(text: str) -> str:
        return str(node.sends(Message(Error(1, text), reply_to=node.working())).error.reason)

    left = [failing(f"{number} " + "x" * 300) for number in range(60)]
    assert sum(len(text) for text in left if "x" in text[:20]) <= 10_000
    assert "used up" in left[-1]
    node.now += datetime.timedelta(days=1)
    assert failing("something else") == "something else"


def test_a_message_that_cannot_be_read_is_answered_and_does_not_end_the_node(
    make_node: MakeNode,
) -> None:
    """Its objects have the right hashes. Whoever may submit a run ended each node with one."""
    node = make_node()
    message = Message(train_message(), NODE, "train")
    message.metadata.__dict__.update(_run_id=7, _src_node_id=SERVER)
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    tree = get_object_tree(message).SerializeToString()
    (broken,) = (name for name, content in objects.items() if content.startswith(b"ConfigRecord"))
    content = b"ConfigRecord  3\x00\xff\xff\xff"
    while broken is not None:  # and whatever holds it
        name = hashlib.sha256(content).hexdigest()
        del objects[broken]
        objects[name], tree = content, tree.replace(broken.encode(), name.encode())
        holders = (other for other in objects if broken.encode() in objects[other])
        broken, before = next(holders, None), broken
        if broken is not None:
            content = objects[broken].replace(before.encode(), name.encode())
    parsed = ObjectTree.FromString(tree)
    message.metadata.__dict__["_message_id"] = parsed.object_id
    assert not node.offers(message, parsed, objects)
    check(node.arrived, "policy")
    check(node.trains(), "")


def test_a_fingerprint_of_data_leaves_only_where_any_reply_does(make_node: MakeNode) -> None:
    """The node cannot tell an app's fingerprint from bytes of a sample."""
    for policy, leaves in ((OPEN, True), (SEALED, False)):
        node = make_node(policy, **PRIVATE)
        config = node.describes({"name": "ward-3", "fingerprint": PLANTED[:16]})
        assert "missing" not in config
        assert ("fingerprint" in config, PLANTED[:16] in node.bytes) == (leaves, leaves)


def test_a_node_counts_the_samples_that_its_data_have_now(tmp_path: Path) -> None:
    """What its owner has withdrawn since a run counts no more."""
    data = tmp_path / "data"
    for name in ("ant", "bee"):
        (data / name).mkdir(parents=True)
        for place in range(3):
            Image.new("L", (4, 4)).save(data / name / f"{place}.png")
    policy, config = Policy(fewest_of_a_class=3), {"data": str(data)}
    guard = Guard(policy, tmp_path / "state", config, run_config_of)
    known = guard._data.identify({})
    assert guard._max_classes() == 2
    (data / "bee" / "1.png").unlink()
    assert guard._max_classes() == 1
    assert guard._data.identify({}) != known
