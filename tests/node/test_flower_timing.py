"""The overrides of Flower's timing fit the Flower that is installed."""

import logging
import random
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal as flower_supernode
from flwr.supernode.nodestate import NodeStateFactory

from flwr_distill.flower import overrides as timing
from flwr_distill.flower import steps
from flwr_distill.flower.line_1_32.node.connection import CALL_TIMEOUT, patch_connection
from flwr_distill.flower.overrides import (
    WholeMessages,
    patch_loop,
    patch_supernode_sleep,
)
from flwr_distill.flower.pulls import patch_pull_backoff
from flwr_distill.flower.steps import Progress, Spacing
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.messages import PACE, POLL_EVERY

start_client_internal: Any = flower_supernode  # mypy: Flower does not export its `time`
LOOP = ("_pull_and_store_message", "_push_messages")
PULLERS = (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree)


@pytest.fixture(autouse=True)
def flower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(start_client_internal, "time", time)
    for name in (*LOOP, "_make_fleet_connection_retry_invoker", "grpc_request_response"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    before = [dict(puller.__kwdefaults__ or {}) for puller in PULLERS]
    yield
    for puller, defaults in zip(PULLERS, before, strict=True):
        puller.__kwdefaults__ = defaults


def paced(busy: float, idle: float, **clock: Any) -> Pace:
    return Pace(busy=busy, idle=idle, generator=random.Random(7), **clock)


class LateObject:
    """An object that is there from the third try on."""

    def __init__(self) -> None:
        self.tries = 0

    def pull(self, object_id: str) -> bytes:
        self.tries += 1
        if self.tries < 3:
            raise ObjectUnavailableError(object_id)
        return b"content"


def test_the_overrides_name_the_flower_that_is_installed() -> None:
    assert version("flwr") in timing.FLOWER_VERSIONS


def test_flower_1_32_1_still_sleeps_where_the_override_expects_it() -> None:
    constants = start_client_internal.start_client_internal.__code__.co_consts
    assert timing.IDLE_SLEEP in constants
    assert timing.REPLY_SLEEP in start_client_internal._push_messages.__code__.co_consts


def test_an_object_that_comes_late_is_pulled_at_once() -> None:
    assert patch_pull_backoff(initial=0.01, cap=0.02)
    late = LateObject()
    start = time.monotonic()
    assert pull_objects(["a"], late.pull) == {"a": b"content"}
    assert late.tries == 3
    assert time.monotonic() - start < 0.5  # stock Flower: at least 2.4 s


def test_an_object_on_a_slow_link_is_not_given_up_after_500_tries() -> None:
    assert patch_pull_backoff(initial=0.0, cap=0.0)
    late = LateObject()
    late.tries = -600
    assert pull_objects(["a"], late.pull) == {"a": b"content"}


def test_an_idle_supernode_waits_for_our_pause_and_not_for_3_seconds() -> None:
    assert patch_supernode_sleep(paced(0.01, 0.01))
    start = time.monotonic()
    start_client_internal.time.sleep(3)
    start_client_internal.time.sleep(0.5)
    assert time.monotonic() - start < 0.3


def test_other_sleeps_of_the_supernode_stay_as_they_are() -> None:
    assert patch_supernode_sleep(paced(0.0, 0.0))
    start = time.monotonic()
    start_client_internal.time.sleep(0.05)
    assert time.monotonic() - start >= 0.05
    assert start_client_internal.time.monotonic is time.monotonic


def test_waiting_for_a_reply_keeps_the_supernode_keen() -> None:
    now = [0.0]
    pace = paced(0.0, 5.0, clock=lambda: now[0])
    assert patch_supernode_sleep(pace, reply_poll=0.0)
    now[0] = 40.0
    assert pace.draw() > 1.0
    start_client_internal.time.sleep(0.5)
    assert pace.draw() == 0.0


@pytest.mark.parametrize(
    ("reason", "attribute", "value"),
    [
        ("another version", "FLOWER_VERSIONS", ("1.0.0",)),
        ("moved internals", None, None),
    ],
)
def test_what_does_not_fit_is_left_alone_with_a_warning(
    reason: str,
    attribute: str | None,
    value: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if attribute is not None:
        monkeypatch.setattr(timing, attribute, value)
    else:
        monkeypatch.setattr(start_client_internal, "time", object())
        for puller in PULLERS:
            monkeypatch.setattr(puller, "__kwdefaults__", {})
    before = [dict(puller.__kwdefaults__ or {}) for puller in PULLERS]
    clock = start_client_internal.time
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert not patch_pull_backoff()
        assert not patch_supernode_sleep(paced(0.0, 0.0))
    assert [dict(puller.__kwdefaults__ or {}) for puller in PULLERS] == before
    assert start_client_internal.time is clock
    assert caplog.text.count("stays Flower's own") == 2, reason


class Intake:
    """A SuperNode's real state and store, and a SuperLink whose run ends while a message comes."""

    def __init__(self, ended: bool, **records: ConfigRecord) -> None:
        stores = ObjectStoreFactory()
        self.store, self.ended, self.seen = stores.store(), ended, list[int]()
        self.state = NodeStateFactory(stores).state()
        self.state.set_node_id(5)
        run = Run.create_empty(7)
        self.state.store_run(run)
        content = RecordDict({"config": ConfigRecord({"a": 1}), **records})
        message = Message(content, 5, "train")
        message.metadata.__dict__.update(_run_id=7, _message_id=message.object_id)
        self.message, self.tree = message, get_object_tree(message)
        self.objects = get_all_nested_objects(message)

    def pull_object(self, run_id: int, object_id: str) -> bytes:
        self.seen.append(self.pending())
        if self.ended:
            raise RunNotRunningException
        return self.objects[object_id].deflate()

    def confirm(self, run_id: int, message_id: str) -> None:
        if self.ended:
            raise RunNotRunningException

    def pull(self) -> int | None:
        return start_client_internal._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (self.message, self.tree),
            get_run=None,
            get_fab=None,
            pull_object=self.pull_object,
            confirm_message_received=self.confirm,
            trusted_entities=None,
        )

    def pending(self) -> int:
        return len(self.state.get_tasks(statuses=["pending"]))


def test_flower_1_32_1_leaves_the_task_of_a_message_whose_run_has_ended() -> None:
    intake = Intake(ended=True)
    assert intake.pull() is None
    assert intake.pending() == 1  # whoever claims it waits for objects that never come


def test_a_message_whose_run_ends_while_it_comes_in_is_cleared_away() -> None:
    assert patch_loop(WholeMessages())
    intake = Intake(ended=True)
    assert intake.pull() is None  # so the SuperNode polls for the next message
    assert intake.pending() == 0


def test_a_message_that_cannot_be_pulled_is_given_up_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert patch_loop(WholeMessages())
    intake = Intake(ended=False)
    monkeypatch.setattr(intake, "objects", {})  # a KeyError, as any error of the network
    assert intake.pull() is None
    assert intake.pending() == 0


def test_a_message_is_offered_as_a_task_once_it_is_all_there() -> None:
    assert patch_loop(WholeMessages())
    intake = Intake(ended=False)
    assert intake.pull() == 7
    assert intake.pending() == 1
    assert set(intake.seen) == {0}


@pytest.mark.parametrize(
    ("record", "longest"),
    [({POLL_EVERY: 2.0}, 2.0), ({POLL_EVERY: "soon"}, 0.05), ({POLL_EVERY: b"x" * 300}, 0.05)],
)
def test_a_server_spaces_a_nodes_looks_until_its_next_message(
    record: dict[str, Any], longest: float
) -> None:
    pace = paced(0.05, 20.0)
    assert patch_loop(Spacing(pace))
    assert Intake(ended=False, **{PACE: ConfigRecord(record)}).pull() == 7
    assert 0.7 * longest < pace.draw() <= longest
    assert Intake(ended=False).pull() == 7
    assert pace.draw() <= 0.05


@pytest.mark.parametrize(("every", "reported"), [(0.0, True), (60.0, False)])
def test_a_node_reports_what_has_moved_of_a_message_and_its_reply_if_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, every: float, reported: bool
) -> None:
    monkeypatch.setattr(steps, "PROGRESS_EVERY", every)
    lines = list[str]()
    progress = Progress(lines.append)
    assert patch_loop(progress)
    intake = Intake(ended=False)
    assert intake.pull() == 7
    pieces, size = len(intake.objects), sum(len(o.deflate()) for o in intake.objects.values())
    if reported:
        assert len(lines) == pieces + 1
        assert lines[-2:] == [f"receives {pieces} of {pieces} pieces, {size / 1e6:.1f} MB", ""]

    def push(send: Any, push_object: Any) -> None:
        send("message", "tree", 1.0)
        push_object(7, "a", b"x" * 2_000_000)

    for sent in ({"a"}, ({"a"}, "session")):
        progress.push(push, send=lambda *_, sent=sent: sent, push_object=lambda *_: None)
        if reported:
            assert lines[-2:] == ["sends 1 of 1 pieces, 2.0 MB", ""]
    if not reported:
        assert lines == []


class Refused(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 3),
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.INVALID_ARGUMENT, 1),
    ],
)
def test_a_full_superlink_is_waited_for_as_one_that_is_away(
    code: grpc.StatusCode, calls: int
) -> None:
    assert patch_connection(lambda: paced(0.0, 0.0), refused=lambda reason: None)
    invoker = start_client_internal._make_fleet_connection_retry_invoker()
    waits, errors = list[float](), [Refused(code), Refused(code)]
    invoker.wait_function = waits.append

    def poll(timeout: float) -> str:
        assert timeout == CALL_TIMEOUT
        if errors:
            raise errors.pop()
        return "message"

    if calls == 1:
        with pytest.raises(Refused):
            invoker.invoke(poll)
    else:
        assert invoker.invoke(poll) == "message"
    assert len(waits) == calls - 1
