"""The SuperLink's stores of objects do as Flower's own does, in fewer queries."""

import sqlite3
import threading

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from flwr_distill.flower.line_1_32.fleet import store as of_store
from flwr_distill.flower.line_1_32.fleet.store import SMALL, Contents, OneConnectionStore
from flwr_distill.flower.line_1_32.objects import NOBODY, MemoryObjectStore

NAMES = [f"{number:064x}" for number in range(5)]
RUNS = 2


def opened(file, kind=OneConnectionStore):
    store = kind(str(file))
    store.initialize()
    return store


def content(number):
    """Records that share parts with those of other numbers."""
    return RecordDict(
        {"shared": ConfigRecord({"lr": 0.1}), "own": ConfigRecord({"number": number % 3})}
    )


CONTENTS = {
    name: part.deflate()
    for number in range(3)
    for name, part in get_all_nested_objects(content(number)).items()
}
IDS = sorted(CONTENTS)
TREES = [get_object_tree(content(number)) for number in range(3)]
CROOKED = [
    ObjectTree(object_id="short"),
    ObjectTree(object_id=IDS[0], children=[ObjectTree(object_id=IDS[1])] * 2),
    ObjectTree(object_id=TREES[0].object_id, children=[ObjectTree(object_id=NAMES[3])]),
    ObjectTree(
        object_id=NAMES[0],
        children=[
            ObjectTree(object_id=NAMES[1], children=[ObjectTree(object_id=NAMES[2])]),
            ObjectTree(object_id=NAMES[2]),
        ],
    ),
]
"""Not an id; a child twice; a message with other parts than before; a part that two others hold."""
MESSAGES = [tree.object_id for tree in (*TREES, CROOKED[3])]
PLACES = st.integers(0, len(IDS) + len(NAMES) - 1)


class Told:
    """What a store answers, without the order in which it happens to list equals."""

    def __init__(self, store):
        self.store = store

    def register(self, number, _):
        trees = TREES + CROOKED
        tree = trees[number % len(trees)]
        run = 1 + int(tree.object_id[-1:], 36) % RUNS  # a message is in one run
        try:
            return set(self.store.preregister(run, tree))
        except ValueError:
            return "refused"

    def put(self, number, _):
        name = IDS[number % len(IDS)]
        try:
            return self.store.put(name, CONTENTS[name])
        except NoObjectInStoreError:
            return "unknown"

    def put_wrong(self, number, _):
        with pytest.raises(ValueError, match="does not match"):
            self.store.put(IDS[number % len(IDS)], CONTENTS[IDS[number % len(IDS) - 1]])

    def get(self, number, _):
        return self.store.get(IDS[number % len(IDS)])

    def delete(self, number, _):
        return self.store.delete(MESSAGES[number % len(MESSAGES)])

    def end(self, _, run):
        return self.store.delete_objects_in_run(run)

    def tree(self, number, _):
        try:
            tree = self.store.get_object_tree(MESSAGES[number % len(MESSAGES)])
        except NoObjectInStoreError:
            return "unknown"
        return {
            part.object_id: {child.object_id for child in part.children}
            for part in iterate_object_tree(tree)
        }

    def clear(self, *_):
        return self.store.clear()

    def all(self):
        """Contents of all objects that there are."""
        findings = {name: self.store.get(name) for name in (*IDS, *NAMES) if name in self.store}
        assert len(findings) == len(self.store)
        return findings


OPERATIONS = ["register", "put", "put_wrong", "get", "delete", "tree", "end", "clear"]


@pytest.fixture(scope="module", params=["SQLite", "memory"])
def stores(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    ours = opened(folder / "ours.db") if request.param == "SQLite" else MemoryObjectStore()
    return opened(folder / "stock.db", SqlObjectStore), ours


@settings(max_examples=60, deadline=None)
@given(
    done=st.lists(
        st.tuples(st.sampled_from(OPERATIONS[:-1] * 4 + OPERATIONS), PLACES, st.integers(1, RUNS)),
        max_size=25,
    )
)
def test_it_answers_and_stores_as_flowers_does(stores, done):
    stock, ours = map(Told, stores)
    for each in (stock, ours):
        each.clear()
    for what, number, run in done:
        assert getattr(ours, what)(number, run) == getattr(stock, what)(number, run), what
        assert ours.all() == stock.all(), what


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path / "state.db")


def filled(store, number=0):
    store.preregister(1, TREES[number])
    for part in iterate_object_tree(TREES[number]):
        store.put(part.object_id, CONTENTS[part.object_id])
    return TREES[number].object_id


def test_what_is_in_memory_is_in_the_database_too(store, tmp_path):
    name = filled(store)
    assert store.get(name) == CONTENTS[name]
    assert opened(tmp_path / "state.db", SqlObjectStore).get(name) == CONTENTS[name]


@pytest.mark.parametrize(
    "kinds", [(SqlObjectStore, OneConnectionStore), (OneConnectionStore, SqlObjectStore)]
)
def test_ours_and_flowers_take_each_others_messages_over(tmp_path, kinds):
    before, after = kinds
    name = filled(opened(tmp_path / "state.db", before))
    store = opened(tmp_path / "state.db", after)
    parts = {part.object_id for part in iterate_object_tree(store.get_object_tree(name))}
    assert parts == {part.object_id for part in iterate_object_tree(TREES[0])}
    if after is OneConnectionStore:
        assert not store.preregister(1, TREES[0])  # a call whose answer was lost, made again
    store.delete(name)
    assert len(store) == 0


def test_an_object_is_one_nodes_whose_message_holds_it(tmp_path):
    for store in (opened(tmp_path / "state.db"), MemoryObjectStore()):
        one, other = (filled(store, number) for number in range(2))
        store.assign(one, 2**64 - 1)
        assert (store.announcer(one), store.announcer(other)) == (2**64 - 1, NOBODY)
        assert store.announcer(NAMES[0]) is None
        for part in iterate_object_tree(TREES[0]):
            assert store.is_announced(part.object_id, 2**64 - 1)
            assert not store.is_announced(part.object_id, 7)
        assert not store.is_announced(other, 2**64 - 1)
        store.delete(one)
        assert store.announcer(one) is None
        assert not store.is_announced(one, 2**64 - 1)


def test_what_was_not_stored_in_the_end_is_not_remembered(store):
    def change_of_mind():
        with store.transaction():
            name = filled(store)
            assert store.get(name) == CONTENTS[name]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_of_mind()
    assert store.get(TREES[0].object_id) is None
    assert len(store) == 0


def recorded_queries(store):
    """What SQLite is asked from now on, transactions' beginnings and ends included."""
    queries = []
    with store.session() as session:
        session.connection().connection.driver_connection.set_trace_callback(queries.append)
    queries.clear()
    return queries


def test_a_message_costs_few_queries(store):
    large = RecordDict({"arrays": ArrayRecord([]), "config": ConfigRecord({"x": 1.0})})
    queries = recorded_queries(store)
    assert store  # counts nothing
    assert not queries
    store.preregister(1, get_object_tree(large))
    assert 0 < len({query[:30] for query in queries}) <= 7 + 2  # SQLite tells of each row
    queries.clear()
    store.get_object_tree(large.object_id)
    assert 0 < len(queries) <= 2 + 2


def test_what_sqlite_refuses_is_told_as_flower_expects_it(store):
    filled(store)
    name = TREES[0].object_id
    again = {"name": name}
    with pytest.raises(IntegrityError, match="UNIQUE"):
        store.query("INSERT INTO objects (object_id, is_available) VALUES (:name, 0)", again)
    assert store.get(name) == CONTENTS[name]


def test_threads_take_turns_at_a_transaction(store):
    seen, inside = [], threading.Event()

    def look():
        inside.wait(10)
        seen.append(len(store))

    thread = threading.Thread(target=look)
    thread.start()
    with store.transaction():
        store.preregister(1, TREES[0])
        inside.set()
        thread.join(0.2)
        assert not seen
        store.preregister(1, TREES[1])
    thread.join(10)
    assert seen == [len(store)]


def test_a_thread_whose_turn_does_not_come_retries_later(store, monkeypatch):
    errors = []
    monkeypatch.setattr(of_store, "TURN_TIMEOUT", 0.1)

    def look():
        try:
            len(store)
        except sqlite3.OperationalError as error:
            errors.append(str(error))

    with store.transaction():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(10)
    (error,) = errors
    assert "database is locked" in error  # what nodes and servers wait out
    assert len(store) == 0


def test_memory_is_bounded_and_the_latest_stay():
    contents = Contents(most=10)
    for number in range(100):
        contents.keep(str(number), b"1234", contents.changes)
    assert [name for name in map(str, range(100)) if contents.get(name)] == ["98", "99"]
    contents.forget({"98"})
    contents.keep("new", b"123456", contents.changes)
    assert contents.get("99") == b"1234"
    assert contents.get("new") == b"123456"


def test_large_objects_are_not_kept():
    contents = Contents()
    contents.keep("large", bytes(SMALL + 1), 0)
    assert contents.get("large") is None


def test_what_was_read_before_a_deletion_is_not_kept_after_it():
    contents = Contents()
    before = contents.changes
    contents.forget({"gone"})
    contents.keep("gone", b"old", before)
    assert contents.get("gone") is None


def test_threads_that_store_and_delete_at_once_get_contents_or_nothing(store):
    wrong, end = [], threading.Event()
    name = TREES[0].object_id

    def read():
        while not end.is_set():
            if store.get(name) not in (CONTENTS[name], b"", None):
                wrong.append(1)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(50):
        filled(store)
        assert store.get(name) == CONTENTS[name]
        store.delete(name)
        assert store.get(name) is None
    end.set()
    reader.join()
    assert not wrong
