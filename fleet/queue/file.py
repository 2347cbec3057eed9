"""The queue's file: an SQLite database in which each change is durable once it is made."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flwr_distill.base.text import listed
from flwr_distill.fleet.queue.entry import UNFINISHED, Entry, Order, QueuedRun, QueueError, State

MAX_BUNDLE = 10 * 2**20
"""Bytes of an app bundle: Flower's own bound."""
MAX_RUNS = 1000
"""Unfinished runs of a user."""
MAX_BYTES = 200 * 2**20
"""Of all app bundles that a user's unfinished runs need; equal ones count once."""
MAX_ENDED = 10_000
"""Ended runs that are kept."""
MAX_REASON = 500
SHOWN = 20
"""Ended runs that a list shows."""
_BUSY = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS bundles (hash TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    uid INTEGER NOT NULL,
    user TEXT NOT NULL,
    bundle TEXT NOT NULL,
    run_config TEXT NOT NULL,
    token TEXT NOT NULL,
    priority INTEGER NOT NULL,
    after INTEGER,
    timeout REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',
    submitted REAL NOT NULL,
    since REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    tried REAL NOT NULL DEFAULT 0,
    started REAL NOT NULL DEFAULT 0,
    run_id TEXT NOT NULL DEFAULT '0',
    stopping TEXT,
    stopping_since REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS in_line ON runs (state, priority DESC, id);
CREATE INDEX IF NOT EXISTS followers ON runs (after) WHERE after IS NOT NULL;
CREATE INDEX IF NOT EXISTS of_bundle ON runs (bundle);
CREATE TABLE IF NOT EXISTS problem (one INTEGER PRIMARY KEY CHECK (one = 1), text TEXT);
"""
_OPEN = "state IN ('waiting', 'starting', 'running')"
_ACTIVE = "state IN ('starting', 'running')"
_ENTRY = (
    "id, state, token, bundle, run_config, timeout, attempts, tried, started, run_id, stopping, "
    "stopping_since, reason"
)


class QueueFile:
    """The runs of a queue, for the one process that serves it; any of its threads may call.

    Parameters
    ----------
    path : Path
        The file; it is made if it does not exist, and only this user can read it.
    clock : Callable[[], float] (default: time.time)
        Seconds since 1970.

    Raises
    ------
    QueueError
        If the file is damaged, locked or not writable.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        try:
            path.touch(mode=0o600)
            self._database = sqlite3.connect(
                path, timeout=_BUSY, isolation_level=None, check_same_thread=False
            )
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA journal_mode = WAL")
            # WAL alone may lose the last ones.
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise QueueError(
                f"cannot be used: {error}",
                where=path,
                remedy="free it (space, permissions, other processes), restore a backup, or move "
                "it away to begin with an empty queue",
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def add(self, order: Order, bundle: bytes, uid: int, user: str) -> int:
        """Put a run at the end of its priority's line, and return its id.

        Raises `QueueError` if the user has too much in the queue, or the run that it is to follow
        is unknown or will not be completed.
        """
        if not 0 < len(bundle) <= MAX_BUNDLE:
            raise QueueError(f"must have 1 to {MAX_BUNDLE} bytes", where="app bundle")
        name = hashlib.sha256(bundle).hexdigest()
        now = self._clock()
        with self._change():
            self._check_room(uid, name, len(bundle))
            self._check_predecessor(order.after)
            self._query("INSERT OR IGNORE INTO bundles VALUES (?, ?)", name, bundle)
            cursor = self._query(
                "INSERT INTO runs (uid, user, bundle, run_config, token, priority, after, timeout, "
                "submitted, since) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(uid, user, name, json.dumps(order.run_config), secrets.token_hex(16)),
                *(order.priority, order.after, order.timeout, now, now),
            )
            return int(cursor.lastrowid or 0)

    def cancel(self, number: int, uid: int, *, anyones: bool = False) -> State:
        """Cancel a run, and return its state: a running one is stopped by the scheduler.

        Raises `QueueError` if it has ended, is unknown, or is another user's and not `anyones`.
        """
        with self._change():
            row = self._query("SELECT uid, user, state FROM runs WHERE id = ?", number).fetchone()
            if row is None:
                raise _unknown(number)
            if row["uid"] != uid and not anyones:
                raise QueueError(f"is {row['user']}'s", where=f"run {number} in the queue")
            state = State(row["state"])
            if state.ended:
                raise QueueError(f"has ended: {state}", where=f"run {number} in the queue")
            if state is State.WAITING:
                self._end(number, State.CANCELLED, "")
                return State.CANCELLED
            self._stop(number, State.CANCELLED, "")
            return state

    def note_time(self) -> None:
        """Move times that lie ahead to now: the clock was set back, and waits must end."""
        now = self._clock()
        ahead = f"{_ACTIVE} AND max(tried, started, stopping_since) > ?"
        with self._lock:
            if not self._query(f"SELECT 1 FROM runs WHERE {ahead}", now).fetchone():
                return
        with self._change():
            self._query(
                "UPDATE runs SET tried = min(tried, ?), started = min(started, ?), "
                f"stopping_since = min(stopping_since, ?) WHERE {ahead}",
                *(now, now, now, now),
            )

    def active(self) -> list[Entry]:
        """Runs that are starting or running."""
        return self._entries(f"WHERE {_ACTIVE} ORDER BY id")

    def next_ready(self) -> Entry | None:
        """The run that starts next; None if none may."""
        ready = self._entries(
            "AS r WHERE state = 'waiting' AND (after IS NULL OR EXISTS (SELECT 1 FROM runs AS p "
            "WHERE p.id = r.after AND p.state = 'completed')) ORDER BY priority DESC, id LIMIT 1"
        )
        return ready[0] if ready else None

    def bundle(self, entry: Entry) -> bytes:
        """The app bundle of an unfinished run."""
        with self._lock:
            row = self._query("SELECT content FROM bundles WHERE hash = ?", entry.bundle).fetchone()
        return bytes(row[0])

    def note_attempt(self, number: int) -> Entry | None:
        """Note, before the SuperLink is asked, that it is; None if the run was cancelled."""
        now = self._clock()
        with self._change():
            self._query(
                "UPDATE runs SET since = CASE state WHEN 'waiting' THEN ? ELSE since END, "
                "state = 'starting', attempts = attempts + 1, tried = ? "
                "WHERE id = ? AND state IN ('waiting', 'starting') AND stopping IS NULL",
                *(now, now, number),
            )
            changed = self._query("SELECT changes()").fetchone()[0]
            return self._entries("WHERE id = ?", number)[0] if changed else None

    def note_tried(self, number: int) -> None:
        """Note that an attempt ended without an answer: the run may appear for some time yet."""
        with self._change():
            self._query("UPDATE runs SET tried = ? WHERE id = ?", self._clock(), number)

    def note_running(self, number: int, run_id: int) -> None:
        """Note that the SuperLink has accepted a run, under this id of its own."""
        now = self._clock()
        with self._change():
            self._query(
                "UPDATE runs SET state = 'running', run_id = ?, since = ?, started = ? "
                "WHERE id = ? AND state = 'starting'",
                *(str(run_id), now, now, number),
            )

    def note_stopping(self, number: int, state: State, reason: str) -> None:
        """Note, before the SuperLink is asked, that a run is to be stopped, and why."""
        with self._change():
            self._stop(number, state, reason)

    def note_asked_to_stop(self, number: int) -> None:
        """Note that the SuperLink was asked to stop a run, the first time."""
        with self._change():
            self._query(
                f"UPDATE runs SET stopping_since = ? WHERE id = ? AND {_ACTIVE} "
                "AND stopping_since = 0",
                *(self._clock(), number),
            )

    def end(self, number: int, state: State, reason: str = "") -> None:
        """Note how a run has ended; those that were to follow are skipped unless it completed."""
        with self._change():
            self._end(number, state, reason)

    def note_problem(self, text: str) -> None:
        """Note what keeps the queue from starting runs; '' if nothing does."""
        with self._change():
            self._query("INSERT OR REPLACE INTO problem VALUES (1, ?)", _one_line(text))

    def _check_room(self, uid: int, name: str, size: int) -> None:
        query = f"SELECT count(*) FROM runs WHERE uid = ? AND {_OPEN}"
        if self._query(query, uid).fetchone()[0] >= MAX_RUNS:
            problem = f"you have {MAX_RUNS} runs in the queue, the most of a user"
            raise QueueError(problem, remedy="retry later, or cancel some")
        query = "SELECT coalesce(sum(length(content)), 0) FROM bundles WHERE hash != ? AND hash IN "
        query += f"(SELECT bundle FROM runs WHERE uid = ? AND {_OPEN})"
        if self._query(query, name, uid).fetchone()[0] + size > MAX_BYTES:
            problem = f"the apps of your runs in the queue would exceed {MAX_BYTES >> 20} MiB"
            raise QueueError(problem, remedy="retry later, or cancel some")

    def _check_predecessor(self, number: int | None) -> None:
        if number is None:
            return
        row = self._query("SELECT state FROM runs WHERE id = ?", number).fetchone()
        if row is None:
            raise _unknown(number)
        state = State(row["state"])
        if state.ended and state is not State.COMPLETED:
            raise QueueError(f"that run is {state}", where="after", value=number)

    def _stop(self, number: int, state: State, reason: str) -> None:
        self._query(
            "UPDATE runs SET stopping = ?, reason = ? "
            f"WHERE id = ? AND {_ACTIVE} AND stopping IS NULL",
            *(state, reason, number),
        )

    def _end(self, number: int, state: State, reason: str) -> None:
        """End a run and, in the same transaction, those that wait for it to complete."""
        ends = [(number, state, reason)]
        while ends:
            each, state, reason = ends.pop()
            ended = self._query(
                "UPDATE runs SET state = ?, since = ?, reason = ? "
                f"WHERE id = ? AND {_OPEN} RETURNING bundle",
                *(state, self._clock(), _one_line(reason), each),
            ).fetchone()
            if ended is None:
                continue
            self._query(
                f"DELETE FROM bundles WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM runs WHERE "
                f"bundle = hash AND {_OPEN})",
                ended["bundle"],
            )
            if state is not State.COMPLETED:
                why = f"run {each}, which it was to follow, is {state}"
                query = "SELECT id FROM runs WHERE after = ? AND state = 'waiting'"
                ends += [(row["id"], State.SKIPPED, why) for row in self._query(query, each)]
        self._query(
            f"DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE NOT {_OPEN} AND id NOT IN "
            "(SELECT after FROM runs WHERE after IS NOT NULL AND state = 'waiting') "
            "ORDER BY id DESC LIMIT -1 OFFSET ?)",
            MAX_ENDED,
        )

    def _entries(self, rest: str, *values: object) -> list[Entry]:
        with self._lock:
            rows = self._query(f"SELECT {_ENTRY} FROM runs {rest}", *values).fetchall()
        return [
            Entry(**{**row, "run_config": json.loads(row["run_config"])}) for row in map(dict, rows)
        ]

    def _query(self, query: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(query, values)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction, durable at its end; one that fails leaves nothing."""
        with self._lock:
            self._query("BEGIN IMMEDIATE")
            try:
                yield
                self._query("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._query("ROLLBACK")
                raise


def read_queue(path: Path, *, ended: int = SHOWN) -> list[QueuedRun]:
    """Read a queue's file: its unfinished runs in their order, then those that ended last.

    It needs no service, and may be called while one changes the file. Without a file there are no
    runs.
    """
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        database.execute("BEGIN")  # one state of the file for all queries
        unfinished = database.execute(
            f"SELECT * FROM runs WHERE {_OPEN} ORDER BY state = 'waiting', priority DESC, id"
        ).fetchall()
        over = database.execute(
            f"SELECT * FROM runs WHERE NOT {_OPEN} ORDER BY since DESC, id DESC LIMIT ?", (ended,)
        ).fetchall()
        problem = database.execute("SELECT text FROM problem").fetchone()
    waits = {row["id"]: row["state"] for row in unfinished}
    text = problem["text"] if problem else ""
    shown, position = [], 0
    for row in [*unfinished, *over]:
        in_line = row["state"] == State.WAITING
        position += in_line
        why = _why(row, waits, position, text)
        shown.append(QueuedRun(**{**row, "position": position if in_line else 0, "why": why}))
    return shown


def _why(row: Mapping[str, Any], unfinished: Mapping[int, str], position: int, problem: str) -> str:
    state = State(row["state"])
    if state in UNFINISHED and problem:
        return problem
    if state is not State.WAITING:
        return "is being stopped" if row["stopping"] and not state.ended else str(row["reason"])
    if row["after"] in unfinished:
        return f"for run {row['after']} to complete"
    if position > 1:
        return f"for {position - 1} before it"
    active = [number for number, other in unfinished.items() if other != State.WAITING]
    if not active:
        return "to be started"
    who = f"run {active[0]}" if len(active) == 1 else f"one of runs {listed([*map(str, active)])}"
    return f"for {who} to end"


def _one_line(text: str) -> str:
    """A bounded line for a terminal of what may be a ServerApp's own words."""
    shown = "".join(char if char.isprintable() else " " for char in text[: 4 * MAX_REASON])
    return " ".join(shown.split())[:MAX_REASON]


def _unknown(number: int) -> QueueError:
    remedy = "`flwr-distill queue` lists them"
    return QueueError("is not in the queue", where=f"run {number}", remedy=remedy)
