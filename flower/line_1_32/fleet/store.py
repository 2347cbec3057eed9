"""Flower's store of objects in SQLite: each message keeps its own, in fewer and shorter queries."""

# ruff: noqa: D102 (Flower's methods)

from __future__ import annotations

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import closing, contextmanager
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import FLWR_IN_MEMORY_SQLITE_DB_URL
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin, _set_sqlite_pragmas
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from sqlalchemy import StaticPool, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from flwr_distill.flower.line_1_32.objects import NOBODY, children_in

IN_MEMORY = 2**26
"""Bytes of objects that are cached in memory."""
SMALL = 2**20
"""Bytes of the largest object that is cached."""
TURN_TIMEOUT = 30.0
"""Seconds that a thread waits for the database: as long as SQLAlchemy's pool would."""
_ANNOUNCED = "flwr_distill_announced"
"""Table of messages' trees, which Flower's own SuperLink does not read."""
_AMONG = "IN (SELECT value FROM json_each(:names))"


class PlainQueries(SqlMixin):
    """Passes queries to SQLite unchanged: Flower has SQLAlchemy parse each of them every time.

    Threads take turns, a transaction each, so that they can share a connection.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turn = threading.RLock()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a transaction, or join the one that this thread has opened.

        Raises `sqlite3.OperationalError` if other threads' turns take too long.
        """
        if not self._turn.acquire(timeout=TURN_TIMEOUT):
            raise sqlite3.OperationalError(f"database is locked for {TURN_TIMEOUT:.0f} s: others")
        try:
            with super().session() as session:
                yield session
        finally:
            self._turn.release()

    def query(
        self, query: str, data: Sequence[dict[str, Any]] | dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Execute a query, once or for each item of a sequence of data; return the rows."""
        with self.session() as session, closing(session.connection().connection.cursor()) as cursor:
            try:
                if data and not isinstance(data, dict):
                    cursor.executemany(query, data)
                else:
                    cursor.execute(query, data or {})
                rows = cursor.fetchall()
            except sqlite3.Error as error:  # as SQLAlchemy's, which Flower catches
                raise DBAPIError.instance(query, data, error, sqlite3.Error) from error
            names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]


class OneConnectionStore(PlainQueries, SqlObjectStore):
    """Flower's store of objects, with one connection to its database.

    SQLite has one writer at a time: others wait for its lock, and connections beyond a pool's
    read the schema again each time. Small objects that were read recently are cached.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._contents = Contents()

    def __bool__(self) -> bool:
        return True  # Flower tests it at each call, and would count its objects

    def initialize(self, log_queries: bool = False) -> list[str]:
        tables = super().initialize(log_queries)
        if self.is_file:
            assert self._engine is not None
            self._engine.dispose()
            self._engine = create_engine(
                self.database_url,
                connect_args={"check_same_thread": False},
                poolclass=StaticPool,
            )
            event.listen(self._engine, "connect", _set_sqlite_pragmas)
            self._session_factory = sessionmaker(bind=self._engine)
        self.query(
            f"CREATE TABLE IF NOT EXISTS {_ANNOUNCED} (object_id TEXT PRIMARY KEY REFERENCES "
            "objects ON DELETE CASCADE, node_id INTEGER NOT NULL, tree BLOB NOT NULL)"
        )
        self.query(f"CREATE INDEX IF NOT EXISTS idx_{_ANNOUNCED} ON {_ANNOUNCED} (node_id)")
        return tables

    @property
    def is_file(self) -> bool:
        """Whether its database is a file; in memory there is one connection already."""
        return self.database_url != FLWR_IN_MEMORY_SQLITE_DB_URL

    def share(self, other: PlainQueries) -> None:
        """Have another part of the state use this connection, too."""
        if other._engine is not None:
            other._engine.dispose()
        other._engine, other._session_factory = self._engine, self._session_factory
        other._turn = self._turn

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all that is stored meanwhile, or nothing."""
        try:
            with self.session():
                yield
        except BaseException:
            self._contents.clear()  # some may never have been stored
            raise

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register a message's objects; return those whose content is missing.

        Raises ValueError as `children_in`, or if the message is registered with another tree.
        """
        message, children = object_tree.object_id, children_in(object_tree)
        with self.session():
            rows = self.query(
                f"SELECT object_id, is_available FROM objects WHERE object_id {_AMONG}",
                {"names": json.dumps(list(children))},
            )
            known = {row["object_id"]: row["is_available"] for row in rows}
            if (tree := self._announced_tree(message)) is None:
                self._announce(run_id, object_tree, children.keys(), known.keys())
            elif children_in(tree) != children:
                raise ValueError(f"Object {message} was preregistered with different children.")
        return [name for name in children if not known.get(name)]

    def _announce(self, run_id: int, tree: ObjectTree, parts: Set[str], known: Set[str]) -> None:
        """Link a message to all of its objects: Flower links each object to its children."""
        message = {"message": tree.object_id}
        names = {**message, "names": json.dumps(list(parts - {tree.object_id}))}
        self.query(
            "INSERT INTO objects (object_id, content, is_available, ref_count) "
            "SELECT value, x'', 0, 0 FROM json_each(:names)",
            {"names": json.dumps(list(parts - known))},
        )
        # A message that Flower's own SuperLink registered is linked to its children already.
        self.query(
            f"UPDATE objects SET ref_count = ref_count + 1 WHERE object_id {_AMONG} AND object_id "
            "NOT IN (SELECT child_id FROM object_children WHERE parent_id = :message)",
            names,
        )
        self.query(
            "INSERT INTO object_children (parent_id, child_id) "
            "SELECT :message, value FROM json_each(:names) WHERE true ON CONFLICT DO NOTHING",
            names,
        )
        self.query(
            "INSERT INTO run_objects (run_id, object_id) VALUES (:run_id, :message) "
            "ON CONFLICT DO NOTHING",
            {**message, "run_id": uint64_to_int64(run_id)},
        )
        self.query(
            f"INSERT INTO {_ANNOUNCED} VALUES (:message, :node, :tree)",
            {**message, "node": NOBODY, "tree": tree.SerializeToString()},
        )

    def _announced_tree(self, message: str) -> ObjectTree | None:
        rows = self.query(
            f"SELECT tree FROM {_ANNOUNCED} WHERE object_id = :message", {"message": message}
        )
        return ObjectTree.FromString(rows[0]["tree"]) if rows else None

    def assign(self, message: str, node_id: int) -> None:
        """Note which node announced a message."""
        self.query(
            f"UPDATE {_ANNOUNCED} SET node_id = :node WHERE object_id = :message",
            {"message": message, "node": uint64_to_int64(node_id)},
        )

    def announcer(self, message: str) -> int | None:
        """Node that announced a message; `NOBODY` if no node did, None if it is missing."""
        rows = self.query(
            f"SELECT node_id FROM {_ANNOUNCED} WHERE object_id = :message", {"message": message}
        )
        return int64_to_uint64(rows[0]["node_id"]) if rows else None

    def is_announced(self, object_id: str, node_id: int) -> bool:
        """Whether an object is part of a message that a node announced."""
        of_node = f"(SELECT object_id FROM {_ANNOUNCED} WHERE node_id = :node)"
        rows = self.query(
            f"SELECT 1 WHERE :name IN {of_node} OR EXISTS (SELECT 1 FROM object_children "
            f"WHERE child_id = :name AND parent_id IN {of_node})",
            {"name": object_id, "node": uint64_to_int64(node_id)},
        )
        return bool(rows)

    def get_object_tree(self, object_id: str) -> ObjectTree:
        with self.session():
            tree = self._announced_tree(object_id)
            return tree or super().get_object_tree(object_id)  # Flower's SuperLink registered it

    def get(self, object_id: str) -> bytes | None:
        """Return an object's content: b"" if it has not arrived, None if it is not registered."""
        if (content := self._contents.get(object_id)) is not None:
            return content
        changes = self._contents.changes
        content = super().get(object_id)
        if content:
            self._contents.keep(object_id, content, changes)
        return content

    def delete(self, object_id: str) -> None:
        """Delete a message, and the objects that no other message has."""
        names = [object_id]
        with self.session():
            self.query(f"DELETE FROM {_ANNOUNCED} WHERE object_id = :name", {"name": object_id})
            while names:
                rows = self.query(
                    "SELECT o.object_id, c.child_id FROM objects AS o "
                    "LEFT JOIN object_children AS c ON c.parent_id = o.object_id "
                    f"WHERE o.ref_count = 0 AND o.object_id {_AMONG} "
                    f"AND o.object_id NOT IN (SELECT object_id FROM {_ANNOUNCED})",
                    {"names": json.dumps(names)},
                )
                if not (gone := {row["object_id"] for row in rows}):
                    return
                self.query(
                    f"DELETE FROM objects WHERE object_id {_AMONG}",
                    {"names": json.dumps(list(gone))},
                )
                self._contents.forget(gone)
                children = [{"child": c} for row in rows if (c := row["child_id"]) is not None]
                if children:
                    self.query(
                        "UPDATE objects SET ref_count = ref_count - 1 "
                        "WHERE object_id = :child AND ref_count > 0",
                        children,
                    )
                names = list(dict.fromkeys(each["child"] for each in children))

    def clear(self) -> None:
        super().clear()
        self._contents.clear()


class Contents:
    """A cache of objects' contents, up to a size.

    `changes` counts removals: contents that were read before one are not cached after it.
    """

    def __init__(self, most: int = IN_MEMORY) -> None:
        self.changes = 0
        self._left = most
        self._most = most
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, bytes] = OrderedDict()

    def get(self, name: str) -> bytes | None:
        with self._lock:
            if (content := self._cached.get(name)) is not None:
                self._cached.move_to_end(name)
            return content

    def keep(self, name: str, content: bytes, changes: int) -> None:
        """Add a content that was read after so many changes, in place of older ones."""
        with self._lock:
            if changes != self.changes or len(content) > SMALL or name in self._cached:
                return
            self._cached[name] = content
            self._left -= len(content)
            while self._left < 0:
                self._left += len(self._cached.popitem(last=False)[1])

    def forget(self, names: set[str]) -> None:
        with self._lock:
            self.changes += 1
            self._left += sum(len(self._cached.pop(name, b"")) for name in names)

    def clear(self) -> None:
        with self._lock:
            self.changes += 1
            self._cached.clear()
            self._left = self._most
