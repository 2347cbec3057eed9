"""A SuperLink with a cache answers as Flower's own does, whatever happens in between."""

import secrets
import threading
import time
from itertools import count

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import NOOP_FLWR_AID
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.federation import NoOpFederationManager
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_distill.flower.line_1_32.fleet import linkstate
from flwr_distill.flower.line_1_32.fleet.linkstate import MemoryLinkState

from .superlinks import message_to, new_node, new_run, opened

NODES = 3


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    folder = tmp_path_factory.mktemp("superlink")
    stock, _ = opened(folder / "stock.db", SqlLinkState, SqlObjectStore)
    return stock, opened(folder / "ours.db")[0]


class Party:
    """A run and its nodes in one state; what it answers bears no ids, which are drawn."""

    def __init__(self, state):
        self.state = state
        self.keys = [secrets.token_bytes(16) for _ in range(NODES)]
        self.nodes = [new_node(state, key) for key in self.keys]
        assert [state.get_node_id_by_public_key(key) for key in self.keys] == self.nodes
        self.run = new_run(state)
        self.task = state.get_run_info(run_ids=[self.run])[0].primary_task_id
        self.sent, self.numbers = {}, count()
        self.got = {node: [] for node in self.nodes}

    def answer(self, what, number):
        return getattr(self, what)(number)

    def who(self, number):
        node = self.state.get_node_id_by_public_key(self.keys[number])
        return None if node is None else self.nodes.index(node)

    def remove(self, number):
        try:
            self.state.delete_node(NOOP_FLWR_AID, self.nodes[number])
        except ValueError:
            return "gone"

    def send(self, number):
        message = message_to(self.nodes[number], self.run)
        self.sent[message.metadata.message_id] = next(self.numbers)
        return self.state.store_message_ins(message) is not None

    def look(self, number):
        findings = self.state.get_message_ins(self.nodes[number], limit=1)
        self.got[self.nodes[number]] += findings
        return [self.sent.get(message.metadata.message_id) for message in findings]

    def reply(self, number):
        """Reply to the oldest message that the node has got."""
        if not (got := self.got[self.nodes[number]]):
            return None
        reply = Message(RecordDict(), reply_to=got.pop(0))
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return self.state.store_message_res(reply) is not None

    def collect(self, number):
        """Ask for the replies to all messages, as a second after the last time."""
        getattr(self.state, "_looked", {}).clear()
        return self.collect_soon(number)

    def collect_soon(self, _):
        findings = self.state.get_message_res(set(self.sent))
        answered = {reply.metadata.reply_to_message_id for reply in findings}
        self.state.delete_messages(answered)
        errors = {reply.metadata.reply_to_message_id: reply.has_error() for reply in findings}
        return sorted((self.sent.pop(name), errors[name]) for name in answered)

    def start(self, _):
        return self.state.claim_task(self.task) is not None, self.state.activate_task(self.task)

    def end(self, number):
        return self.state.finish_task(self.task, ("completed", "stopped", "failed")[number], "")

    def status(self, _):
        status = self.state.get_run_status({self.run})[self.run]
        return status.status, status.sub_status

    def book(self, number):
        try:
            self.state.store_traffic(self.run, bytes_sent=number, bytes_recv=2 * number)
        except ValueError as error:
            return str(error).partition(" for ")[0]

    def traffic(self, _):
        (run,) = self.state.get_run_info(run_ids=[self.run])
        return run.bytes_sent, run.bytes_recv


OPERATIONS = [
    *("who", "remove", "send", "look", "reply", "collect"),
    *("start", "end", "status", "book", "traffic"),
]


@settings(max_examples=40)
@given(
    done=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, NODES - 1)), max_size=30)
)
@example([("who", 0), ("remove", 0), ("who", 0)])
@example([("start", 0), ("status", 0), ("end", 0), ("status", 0)])
@example([("start", 0), ("status", 0), ("end", 2), ("status", 0)])
def test_it_answers_as_flowers_state_does(states, done):
    stock, ours = (Party(state) for state in states)
    for what, number in done:
        assert ours.answer(what, number) == stock.answer(what, number), (what, number)


def test_a_message_that_comes_between_reading_and_remembering_is_found(states, monkeypatch):
    ours = Party(states[1])
    ours.start(0)
    read = SqlLinkState._claim_message_ins_rows

    def slow(*arguments):
        rows = read(*arguments)
        ours.send(0)
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(SqlLinkState, "_claim_message_ins_rows", slow)
        assert ours.look(0) == []
    assert ours.look(0) == [0]


def test_no_message_is_overlooked_that_comes_while_its_node_looks(states):
    ours = Party(states[1])
    ours.start(0)
    got, end = [], threading.Event()

    def look():
        while not end.is_set():
            got.extend(ours.look(0))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    for number in range(100):
        assert ours.send(0)
        deadline = time.monotonic() + 10
        while len(got) <= number:
            assert time.monotonic() < deadline, f"message {number} was overlooked"
            time.sleep(0.0005)
    end.set()
    looking.join()
    assert got == list(range(100))


def test_replies_are_told_at_once_and_lost_nodes_within_a_second(states, monkeypatch):
    ours = Party(states[1])
    ours.start(0)
    for node in range(3):
        assert ours.send(node)
        ours.look(node)
    assert ours.collect_soon(0) == []
    assert ours.reply(1)
    assert ours.collect_soon(0) == [(1, False)]
    ours.remove(2)
    assert ours.collect_soon(0) == []
    monkeypatch.setattr(linkstate, "FRESH", 0.0)
    assert ours.collect_soon(0) == [(2, True)]


def test_looks_for_replies_do_not_go_through_all_messages(states, monkeypatch):
    ours, requests = Party(states[1]), []
    ours.start(0)
    for _ in range(20):
        ours.send(0)
    ours.collect_soon(0)
    read = SqlLinkState.get_message_res
    monkeypatch.setattr(
        SqlLinkState,
        "get_message_res",
        lambda self, ids: requests.append(len(ids)) or read(self, ids),
    )
    ours.look(0)
    ours.reply(0)
    ours.collect_soon(0)
    ours.collect_soon(0)
    assert requests == [1, 0]


@pytest.mark.parametrize("where", ["SQLite", "memory"])
def test_what_a_node_had_fetched_is_lost_once_it_starts_again_and_nothing_else(states, where):
    in_memory = MemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())
    ours = Party(states[1] if where == "SQLite" else in_memory)
    ours.start(0)
    for _ in range(3):
        ours.send(1)
    ours.look(1)
    ours.look(1)
    ours.reply(1)  # to the first; the second is lost, the third was not fetched
    ours.collect(0)
    ours.state.deactivate_node(ours.nodes[1])
    assert ours.state.activate_node(ours.nodes[1], 30.0)  # nobody asked while it was away
    assert ours.collect(0) == [(1, True)]
    assert ours.look(1) == [2]
    ours.got[ours.nodes[1]] = ours.got[ours.nodes[1]][-1:]
    ours.reply(1)
    assert ours.collect(0) == [(2, False)]
    assert not ours.state._lost


def test_lost_messages_that_nobody_asks_for_take_bounded_memory(states, monkeypatch):
    ours = Party(states[1])
    monkeypatch.setattr(linkstate, "MAX_LOST", 2)
    ours.start(0)
    for _ in range(4):
        ours.send(2)
        ours.look(2)
    ours.state.deactivate_node(ours.nodes[2])
    assert ours.state.activate_node(ours.nodes[2], 30.0)
    assert len(ours.state._lost) == 2
    ours.state.delete_messages(set(ours.sent))
    assert not ours.state._lost


def test_what_replies_were_asked_for_takes_bounded_memory(states, monkeypatch):
    ours = Party(states[1])
    monkeypatch.setattr(linkstate, "MAX_POLLED", 100)
    for start in range(10):
        ours.state.get_message_res({f"{start} {number}" for number in range(60)})
    assert len(ours.state._looked) <= 160


def test_ids_that_strangers_make_up_take_no_memory(states):
    ours = Party(states[1])
    before = len(ours.state._without_message)
    for stranger in range(2**40, 2**40 + 100):
        assert ours.state.get_message_ins(stranger, limit=1) == []
    assert ours.look(0) == []
    assert len(ours.state._without_message) == before + 1


def test_messages_of_before_a_restart_are_there_after_it(tmp_path):
    before = Party(opened(tmp_path / "state.db")[0])
    before.start(0)
    before.send(1)
    after, _ = opened(tmp_path / "state.db")
    assert len(after.get_message_ins(before.nodes[1], limit=1)) == 1
    assert after.get_node_id_by_public_key(before.keys[1]) == before.nodes[1]


def test_flowers_own_superlink_takes_the_database_over(tmp_path):
    ours = Party(opened(tmp_path / "state.db")[0])
    ours.start(0)
    ours.send(2)
    stock, _ = opened(tmp_path / "state.db", SqlLinkState, SqlObjectStore)
    assert len(stock.get_message_ins(ours.nodes[2], limit=1)) == 1


def test_a_database_in_memory_works_too():
    assert Party(opened(":memory:")[0]).who(1) == 1
