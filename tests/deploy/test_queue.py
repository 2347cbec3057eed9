"""The queue's order, its users, and what is left after it was killed at any step."""

import os
import pwd
import signal
import socket
import sqlite3
import struct
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.fleet.queue import file as queue_file
from flwr_distill.fleet.queue.door import FILE, MAX_CALLS, SOCKET, Door, call, listed_runs
from flwr_distill.fleet.queue.entry import TOKEN, Order, QueueError, State
from flwr_distill.fleet.queue.file import QueueFile, read_queue
from flwr_distill.fleet.queue.scheduler import SETTLE, STOP_GRACE, Scheduler
from flwr_distill.flower.control import OutageError, RunStatus
from flwr_distill.protocol.socket_path import short_path
from tests.waiting import wait_until

ALICE, BOB = 1001, 1002
ENDS = {"completes": State.COMPLETED, "fails": State.FAILED, "hangs": State.STOPPED}
POLLS = 2
"""Polls of a run until it ends."""


def order(**settings):
    return Order(**{"run_config": {}, **settings})


class KilledAt:
    """Kills this process at its n-th step."""

    def __init__(self, step):
        self._left = step

    def step(self):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class KillableFile(QueueFile):
    """A queue's file of which each query is a step."""

    def __init__(self, path, kill, clock):
        self._kill = kill
        super().__init__(path, clock)

    def _query(self, query, *values):
        self._kill.step()
        return super()._query(query, *values)


class SuperLink:
    """Runs in a file of their own, which outlives its callers.

    Each call is two steps: one before it acts, and one before its answer. `lost` are the numbers of
    the runs of which the answer is lost, and the SuperLink with it for a moment.
    """

    def __init__(self, path, kill, lost):
        self._database = sqlite3.connect(path, isolation_level=None)
        self._kill, self._lost = kill, lost
        self._do("PRAGMA synchronous = OFF")
        self._do("CREATE TABLE IF NOT EXISTS runs (token, fate, polls, status)")

    def _do(self, query, *values):
        return self._database.execute(query, values).fetchall()

    def start_run(self, bundle, config):
        self._kill.step()
        values = (config[TOKEN], config["fate"], "running")
        self._do("INSERT INTO runs VALUES (?, ?, 0, ?)", *values)
        self._kill.step()
        ((number,),) = self._do("SELECT count(*) FROM runs")
        if number in self._lost:
            raise OutageError("away")
        return number

    def run_status(self, number):
        self._kill.step()
        self._do("UPDATE runs SET polls = polls + 1 WHERE rowid = ?", number)
        query = "SELECT fate, polls, status FROM runs WHERE rowid = ?"
        ((fate, polls, status),) = self._do(query, number)
        if status == "running" and polls > POLLS and fate != "hangs":
            status = f"finished:{ENDS[fate]}"
            self._do("UPDATE runs SET status = ? WHERE rowid = ?", status, number)
        self._kill.step()
        return RunStatus(status)

    def runs_with(self, setting, value):
        self._kill.step()
        return [row[0] for row in self._do("SELECT rowid FROM runs WHERE token = ?", value)]

    def stop_run(self, number):
        self._kill.step()
        query = "UPDATE runs SET status = 'finished:stopped' WHERE rowid = ? AND status = 'running'"
        self._do(query, number)
        self._kill.step()


def serve(folder, at_once, begin, lost=(), *, kill=0, steps=1000):
    """Make steps in a process of its own, which is killed at its step `kill`; 0: never."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    failed = 1
    try:
        now = [begin]
        killer = KilledAt(kill)
        queue = KillableFile(folder / FILE, killer, lambda: now[0])
        link = SuperLink(folder / "superlink.db", killer, lost)
        scheduler = Scheduler(queue, lambda: link, at_once, lambda: now[0])
        for _ in range(steps):
            now[0] += SETTLE * 0.7
            try:
                scheduler.step(link)
            except OutageError:
                continue
            if not queue.active() and queue.next_ready() is None:
                break
        failed = 0
    finally:
        os._exit(failed)


def expected(orders):
    """Ids in the order of their starts, and how each run ends, one at a time."""
    ends, starts = {}, []
    while ready := [
        i for i, (_, after, _) in orders.items() if i not in ends and waits(after, ends)
    ]:
        number = min(ready, key=lambda i: (-orders[i][0], i))
        starts.append(number)
        ends[number] = ENDS[orders[number][2]]
    return starts, {i: ends.get(i, State.SKIPPED) for i in orders}


def waits(after, ends):
    return after is None or ends.get(after) == State.COMPLETED


@st.composite
def queued(draw):
    orders = {}
    for i in range(1, draw(st.integers(1, 6)) + 1):
        after = st.none() | st.integers(1, i - 1) if i > 1 else st.none()
        orders[i] = (draw(st.integers(-2, 2)), draw(after), draw(st.sampled_from(sorted(ENDS))))
    return orders


@settings(max_examples=15)
@given(
    queued(),
    st.integers(1, 3),
    st.lists(st.integers(1, 60), max_size=4),
    st.sets(st.integers(1, 5), max_size=2),
)
def test_a_queue_killed_at_any_step_starts_each_run_once_and_in_order(orders, at_once, kills, lost):
    with TemporaryDirectory() as name:
        folder = Path(name)
        with closing(QueueFile(folder / FILE, lambda: 0.0)) as queue:
            for priority, after, fate in orders.values():
                wish = order(
                    run_config={"fate": fate}, priority=priority, after=after, timeout=500.0
                )
                queue.add(wish, b"app", ALICE, "alice")
        for number, kill in enumerate(kills):
            serve(folder, at_once, 50.0 * number, lost, kill=kill)
        assert serve(folder, at_once, 50.0 * len(kills), lost) == 0
        with closing(sqlite3.connect(folder / "superlink.db")) as database:
            started = [row[0] for row in database.execute("SELECT token FROM runs ORDER BY rowid")]
        with closing(sqlite3.connect(folder / FILE)) as database:
            tokens = dict(database.execute("SELECT token, id FROM runs"))
            bundles = database.execute("SELECT count(*) FROM bundles").fetchone()[0]
        ends = {run.id: run.state for run in read_queue(folder / FILE)}
    assert len(set(started)) == len(started), "a run was started twice"
    starts, states = expected(orders)
    assert ends == states
    assert bundles == 0
    if at_once == 1:
        assert [tokens[token] for token in started] == starts


@pytest.fixture
def queue(tmp_path):
    with closing(QueueFile(tmp_path / FILE)) as opened:
        yield opened


def test_a_run_that_waits_is_cancelled_at_once_with_those_that_follow(queue, tmp_path):
    first = queue.add(order(), b"app", ALICE, "alice")
    second = queue.add(order(after=first), b"app", BOB, "bob")
    queue.add(order(after=second), b"app", ALICE, "alice")
    with pytest.raises(QueueError, match="bob"):
        queue.cancel(second, ALICE)
    queue.cancel(first, ALICE)
    states = {run.id: run.state for run in read_queue(tmp_path / FILE)}
    assert list(states.values()).count(State.SKIPPED) == 2
    assert queue.next_ready() is None
    with pytest.raises(QueueError, match="cancelled"):
        queue.add(order(after=first), b"app", ALICE, "alice")
    with pytest.raises(QueueError, match="ended"):
        queue.cancel(first, ALICE)
    with pytest.raises(QueueError, match="not in the queue"):
        queue.add(order(after=99), b"app", ALICE, "alice")


def test_a_users_share_of_the_queue_is_bounded(queue, monkeypatch):
    monkeypatch.setattr(queue_file, "MAX_RUNS", 2)
    monkeypatch.setattr(queue_file, "MAX_BYTES", 10)
    queue.add(order(), b"sixsix", ALICE, "alice")
    with pytest.raises(QueueError, match="MiB"):
        queue.add(order(), b"others", ALICE, "alice")
    queue.add(order(), b"sixsix", ALICE, "alice")
    with pytest.raises(QueueError, match="2 runs"):
        queue.add(order(), b"sixsix", ALICE, "alice")
    queue.add(order(), b"others", BOB, "bob")
    with pytest.raises(QueueError, match="bytes"):
        queue.add(order(), b"", BOB, "bob")


def test_a_run_that_cannot_be_submitted_blocks_no_other(queue, tmp_path):
    for text in ("refused", "fine"):
        queue.add(order(run_config={"text": text}), b"app", ALICE, "alice")

    class Picky:
        def start_run(self, bundle, config):
            if config["text"] == "refused":
                raise ValueError("\x1b[31mcannot\nbe encoded")
            return 7

    Scheduler(queue, Picky).step(Picky())
    running, failed = read_queue(tmp_path / FILE)
    assert (running.state, running.run_id) == (State.RUNNING, "7")
    assert (failed.state, failed.why) == (State.FAILED, "[31mcannot be encoded")


class Stubborn:
    """A SuperLink that is away for two minutes from the start of a run, and stops none."""

    def __init__(self):
        self.now, self.asked = 1000.0, []

    def start_run(self, bundle, config):
        return 7

    def run_status(self, number):
        if self.now < 1120.0:
            raise OutageError("away")
        return RunStatus("running")

    def stop_run(self, number):
        self.asked.append(self.now)


@pytest.mark.parametrize("cancels", [True, False])
def test_a_run_is_given_up_only_after_the_superlink_was_asked_to_stop_it(tmp_path, cancels):
    link = Stubborn()
    with closing(QueueFile(tmp_path / FILE, lambda: link.now)) as queue:
        scheduler = Scheduler(queue, lambda: link, clock=lambda: link.now)
        number = queue.add(order(timeout=10_000.0 if cancels else 5.0), b"app", ALICE, "alice")
        scheduler.step(link)
        if cancels:
            queue.cancel(number, ALICE)
        while queue.active():
            link.now += 10.0
            with suppress(OutageError):
                scheduler.step(link)
    (run,) = read_queue(tmp_path / FILE)
    assert run.state is (State.CANCELLED if cancels else State.STOPPED)
    assert run.why.endswith("the SuperLink did not stop run 7")
    assert link.asked[0] == 1120.0
    assert link.now > 1120.0 + STOP_GRACE


def test_old_runs_are_removed_but_not_those_that_others_follow(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(queue_file, "MAX_ENDED", 1)
    followed, *others = (queue.add(order(), b"app", ALICE, "alice") for _ in range(4))
    follower = queue.add(order(after=followed), b"app", ALICE, "alice")
    for number in (followed, *others):
        queue.note_attempt(number)
        queue.end(number, State.COMPLETED)
    assert {run.id for run in read_queue(tmp_path / FILE)} == {followed, others[-1], follower}
    assert queue.next_ready().id == follower


@contextmanager
def served(folder, queue):
    with Door(folder, queue, lambda: None) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        try:
            yield door
        finally:
            door.shutdown()


def answer_to(content, folder):
    """Answer to a call that our own client would not make."""
    with socket.socket(socket.AF_UNIX) as line, short_path(folder / SOCKET) as path:
        line.settimeout(20)
        line.connect(path)
        line.sendall(struct.pack(">I", len(content)) + content)
        return line.recv(1000)


def test_calls_are_bounded_and_say_what_is_wrong(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with pytest.raises(QueueError, match="queue serve"):
        call(folder, call="list", ended=0)
    with closing(QueueFile(folder / FILE)) as queue, served(folder, queue):
        add = {"call": "add", "order": {"run_config": {"num-rounds": 2, "train.lr": 0.1}}}
        assert call(folder, b"app", **add) == 1
        for wrong in ({"priority": 101}, {"timeout": -1}, {"run_config": {"a": [1]}}, {"x": 1}):
            with pytest.raises(QueueError, match=next(iter(wrong))):
                call(folder, b"app", call="add", order={**add["order"], **wrong})
        with pytest.raises(QueueError, match=r"cannot be read|run_config"):
            call(folder, b"app", call="add", order={"run_config": {"a": 10**400}})
        with pytest.raises(QueueError, match="does not know"):
            call(folder, call="cancel", id="1")
        assert b"cannot be read" in answer_to(100_000 * b"[", folder)
        with pytest.raises(QueueError, match="bytes are too many"):
            call(folder, bytes(queue_file.MAX_BUNDLE + 1), **add)
        (run,) = listed_runs(folder, ended=10)
        assert (run.user, run.position) == (pwd.getpwuid(os.getuid()).pw_name, 1)
        assert call(folder, call="cancel", id=1) == State.CANCELLED


def test_a_user_with_too_many_calls_is_given_the_reason(tmp_path):
    with ExitStack() as stack:
        queue = stack.enter_context(closing(QueueFile(tmp_path / FILE)))
        door = stack.enter_context(served(tmp_path, queue))
        for _ in range(MAX_CALLS):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(str(tmp_path / SOCKET))
        wait_until(lambda: door._calls[os.getuid()] == MAX_CALLS)
        for bundle in (b"app", bytes(queue_file.MAX_BUNDLE)):
            with pytest.raises(QueueError, match=f"{MAX_CALLS} calls already.*retry later"):
                call(tmp_path, bundle, call="add", order={"run_config": {}})
        line.close()
        wait_until(lambda: door._calls[os.getuid()] < MAX_CALLS)
        assert call(tmp_path, b"app", call="add", order={"run_config": {}}) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to call as another user")
def test_a_user_cannot_cancel_anothers_run_over_the_socket():
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o750)  # open to its group, as the socket is
        with closing(QueueFile(folder / FILE)) as queue, served(folder, queue):
            number = call(folder, b"app", call="add", order={"run_config": {}})
            child = os.fork()
            if not child:
                os.setuid(BOB)  # but in root's group
                try:
                    call(folder, call="cancel", id=number)
                except QueueError as error:
                    os._exit(42 if "root" in str(error) else 2)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
            assert [run.state for run in listed_runs(folder, ended=10)] == [State.WAITING]


def test_a_damaged_file_is_named_and_to_users_as_well(tmp_path):
    (tmp_path / FILE).write_bytes(b"garbage" * 1000)
    with pytest.raises(QueueError, match="file is not a database") as caught:
        QueueFile(tmp_path / FILE)
    assert caught.value.where == str(tmp_path / FILE)
    (tmp_path / FILE).unlink()
    with closing(QueueFile(tmp_path / FILE)) as queue, Door(tmp_path, queue, lambda: None) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        call(tmp_path, b"app", call="add", order={"run_config": {"a": "b" * 4000}})
        queue._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with (tmp_path / FILE).open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4096 * 8)
        with pytest.raises(QueueError, match=r"the queue's file cannot be used: .*malformed"):
            listed_runs(tmp_path, ended=0)
        door.shutdown()
