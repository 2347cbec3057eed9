"""What a SuperNode reports to its supervisor, at the places where Flower comes by it."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import grpc
import pytest
from flwr.server.superlink.fleet.grpc_rere import fleet_servicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from flwr_distill.flower.line_1_32.node.connection import BatchingStub
from flwr_distill.flower.overrides import Reports, patch_reports
from flwr_distill.node.notes import Notes

UNKNOWN = "No SuperNode found with the given public key."
EXITING = (
    "flwr.supernode.cli.flower_supernode",
    "flwr.supernode.start_client_internal",
    "flwr.supercore.tls",
)


def wait_for_all(notes: Notes) -> list[Any]:
    results = []
    while notes.is_waiting():
        results.append(tuple(notes.receive(60)))
    return results


@pytest.fixture
def notes() -> Iterator[tuple[Notes, Notes]]:
    ours, theirs = Notes.pair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def patched(notes: tuple[Notes, Notes], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Flower's code that reports; what it has reported."""
    monkeypatch.setattr(InMemoryNodeState, "set_node_id", InMemoryNodeState.set_node_id)
    for name in EXITING:
        monkeypatch.setattr(import_module(name), "flwr_exit", lambda *_, **__: None)
    patch_reports(Reports(notes[1]))
    return lambda: wait_for_all(notes[0])


def test_a_supernode_that_the_superlink_admits_is_online_with_flowers_node_id(
    patched: Callable[[], list[Any]],
) -> None:
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(123)
    assert patched() == [("online", 123)]
    assert state.get_node_id() == 123


def test_flower_1_32_1_still_sets_the_id_once_it_is_admitted_and_nowhere_else() -> None:
    source = inspect.getsource(start_client_internal)
    assert source.count("set_node_id(") == 1


@pytest.mark.parametrize("module", EXITING)
def test_why_flower_ends_a_supernode_is_reported_wherever_it_does(
    module: str, patched: Callable[[], list[Any]]
) -> None:
    import_module(module).flwr_exit(302, "Unable to parse the private key file.\nSee ...")
    assert patched() == [("unfit", "Unable to parse the private key file.")]


def test_an_end_by_request_is_not_reported_as_a_failure(patched: Callable[[], list[Any]]) -> None:
    start_client_internal.flwr_exit(1, "SuperNode terminated gracefully.")  # type: ignore[attr-defined]
    assert patched() == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (message_handler, "No SuperNode found with the given public key"),
        (fleet_servicer, "All SuperNodes must be registered via the CLI"),
    ],
)
def test_flower_1_32_1_still_refuses_nodes_in_these_words(
    module: Any, text: str, notes: tuple[Notes, Notes]
) -> None:
    assert text in inspect.getsource(module)
    Reports(notes[1]).refused(f"{text}.")
    ((kind, remedy),) = wait_for_all(notes[0])
    assert kind == "unfit"
    assert "flwr-distill register" in remedy


def test_a_refusal_names_the_key_and_what_helps_if_it_was_revoked(
    notes: tuple[Notes, Notes],
) -> None:
    Reports(notes[1], "certs/ward-3/login.key").refused(UNKNOWN)
    ((_, remedy),) = wait_for_all(notes[0])
    assert "auth-key = 'certs/ward-3/login.key'" in remedy
    assert "issue another if it was revoked" in remedy


def test_a_refusal_that_may_pass_is_not_reported(notes: tuple[Notes, Notes]) -> None:
    Reports(notes[1]).refused("SuperNode with node ID 5 could not be activated.")
    assert wait_for_all(notes[0]) == []


def test_of_a_node_that_is_online_nothing_more_is_reported(notes: tuple[Notes, Notes]) -> None:
    reports = Reports(notes[1])
    reports.online(1)
    reports.refused(UNKNOWN)
    reports.exits(302, "Unable to parse the private key file.")
    assert wait_for_all(notes[0]) == [("online", 1)]


class Refused(grpc.RpcError):  # type: ignore[misc]
    def details(self) -> str:
        return UNKNOWN


class Channel:
    """Every call over it is refused."""

    def unary_unary(self, *_: Any, **__: Any) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> None:
            raise Refused

        return refuse


@pytest.mark.parametrize("call", ["RegisterNode", "ActivateNode"])
def test_what_the_superlink_says_to_a_node_that_it_refuses_is_handed_on(call: str) -> None:
    reasons = list[str]()
    stub = BatchingStub(Channel(), refused=reasons.append)
    with pytest.raises(Refused):
        getattr(stub, call)(object())
    assert reasons == [UNKNOWN]
