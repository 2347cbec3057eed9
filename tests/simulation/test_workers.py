"""Worker processes answer every message, whatever the app does, and if some die."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from flwr_distill.node.nursery import can_fork
from flwr_distill.node.processes import kill_group
from flwr_distill.simulation import memory
from flwr_distill.simulation import workers as module
from flwr_distill.simulation.memory import SHARED_MEMORY
from flwr_distill.simulation.workers import WorkerError, Workers
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.source import ReadDataset

FIRST = 2**64 - 9


@pytest.fixture
def pool(monkeypatch):
    """Opens workers whose app is that of `echo`."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    opened = []

    def open_pool(nodes=2, count=1, app="echo"):
        configs = {FIRST + place: {"place": place} for place in range(nodes)}
        opened.append(Workers(configs, 1, {}, count, f"tests.simulation.{app}:app"))
        return opened[-1]

    yield open_pool
    for workers in opened:
        workers.close()


def orders(place, name="", ttl=60.0, **what):
    message = Message(RecordDict({"orders": ConfigRecord(what)}), FIRST + place, "query", ttl=ttl)
    message.metadata.__dict__["_message_id"] = name or f"to-{place}"
    return message


def replies(workers, messages, seconds=60):
    """Replies to messages, by id."""
    workers.submit(messages)
    found, end = {}, time.monotonic() + seconds
    while len(found) < len(messages):
        assert time.monotonic() < end
        found.update(workers.wait(1.0))
    return {
        name: answer if isinstance(answer, Error) else dict(answer["reply"])
        for name, answer in found.items()
    }


def test_every_node_answers_with_its_own_config_and_state(pool):
    workers = pool(nodes=5, count=2)
    for asked in (1, 2):
        answers = replies(workers, [orders(place) for place in range(5)])
        assert {n: (a["place"], a["asked"]) for n, a in answers.items()} == {
            f"to-{place}": (place, asked) for place in range(5)
        }


def test_an_app_that_empties_its_state_finds_it_empty(pool):
    workers = pool()
    asked = [
        replies(workers, [orders(0, forget=forget)])["to-0"]["asked"] for forget in (0, 0, 1, 0)
    ]
    assert asked == [1, 2, 3, 1]


def test_a_node_has_one_message_at_a_time_and_its_state_is_of_the_one_before(pool):
    workers = pool(count=2)
    messages = [orders(0, f"m{number}", sleep=0.3) for number in range(3)]
    answers = replies(workers, messages)
    assert sorted(answer["asked"] for answer in answers.values()) == [1, 2, 3]


def test_an_error_that_an_app_replies_is_the_nodes_and_its_state_counts(pool):
    workers = pool()
    error = replies(workers, [orders(0, refuse=True)])["to-0"]
    assert (error.code, error.reason) == (77, "as ordered")
    assert replies(workers, [orders(0)])["to-0"]["asked"] == 2


def test_a_fork_that_answers_in_its_workers_place_is_not_taken_for_another_node(pool):
    workers = pool(nodes=3)
    answers = replies(workers, [orders(0, fork="and answer"), orders(1), orders(2)])
    answers |= replies(workers, [orders(1), orders(2)])
    assert {answers["to-1"]["place"], answers["to-2"]["place"]} == {1, 2}


def test_a_worker_that_dies_beside_a_fork_of_it_is_replaced_at_once(pool):
    workers = pool()
    replies(workers, [orders(0)])
    pid = workers._workers[0].process.pid
    answers = replies(workers, [orders(0, ttl=3600.0, fork="and die"), orders(1)])
    assert "SIGKILL" in answers["to-0"].reason
    assert answers["to-1"]["place"] == 1
    assert not [
        process  # its fork, which was of its group
        for process in psutil.process_iter(["status"])
        if os.getpgid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_what_an_app_raises_is_the_nodes_error(pool):
    answers = replies(pool(), [orders(0, **{"raise": True}), orders(1)])
    assert "as ordered" in answers["to-0"].reason
    assert answers["to-1"]["place"] == 1


def test_a_killed_worker_costs_its_message_alone(pool):
    workers = pool(nodes=3)
    before = replies(workers, [orders(0)])["to-0"]["pid"]
    answers = replies(workers, [orders(0, die=True), orders(1), orders(2)])
    assert "SIGKILL" in answers["to-0"].reason
    assert {answers["to-1"]["place"], answers["to-2"]["place"]} == {1, 2}
    assert answers["to-1"]["pid"] != before


def test_an_app_that_hangs_is_killed_once_its_message_is_too_old(pool, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)
    workers = pool()
    replies(workers, [orders(0)])
    start = time.monotonic()
    answers = replies(workers, [orders(0, ttl=0.5, sleep=500), orders(1)])
    assert isinstance(answers["to-0"], Error)
    assert answers["to-1"]["place"] == 1
    assert time.monotonic() - start < 30


def test_nodes_that_do_not_answer_in_time_do_not_end_the_run(pool, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)
    workers = pool()
    replies(workers, [orders(0)])
    for _ in range(module.MAX_DEATHS + 2):
        answers = replies(workers, [orders(0, ttl=0.3, sleep=500)])
        assert "in time" in answers["to-0"].reason
    assert replies(workers, [orders(1)])["to-1"]["place"] == 1


def test_a_message_that_expires_in_the_queue_does_not_reach_the_app(pool):
    workers = pool(nodes=3)
    replies(workers, [orders(0)])
    messages = [orders(0, sleep=1.0), orders(1, ttl=0.3), orders(2, ttl=0.3)]
    answers = replies(workers, messages)
    assert isinstance(answers["to-2"], Error)
    assert replies(workers, [orders(2)])["to-2"]["asked"] == 1


def test_workers_that_die_one_after_the_other_end_the_run(pool):
    workers = pool()
    replies(workers, [orders(0)])
    with pytest.raises(WorkerError):
        replies(workers, [orders(0, f"m{n}", die=True) for n in range(9)])


def test_nodes_that_kill_their_workers_at_once_do_not_end_the_run_of_others(pool):
    workers = pool(nodes=7, count=3)
    dying = [orders(place, die=True) for place in range(5)]
    answers = replies(workers, [*dying, orders(5), orders(6)])
    assert {answers["to-5"]["place"], answers["to-6"]["place"]} == {5, 6}


def test_the_messages_that_took_longest_go_first(pool):
    workers = pool(nodes=3)
    replies(workers, [orders(0), orders(1, sleep=0.5), orders(2, sleep=0.2)])
    workers.submit([orders(place) for place in range(3)])
    order = []
    while len(order) < 3:
        order += [name for name, _ in workers.wait(1.0)]
    assert order == ["to-1", "to-2", "to-0"]


def test_a_node_stays_with_the_worker_that_has_its_data(pool):
    workers = pool(nodes=4, count=2)
    messages = [orders(place, sleep=0.05) for place in range(4)]
    first = {n: a["pid"] for n, a in replies(workers, messages).items()}
    assert len(set(first.values())) == 2
    again = {n: a["pid"] for n, a in replies(workers, messages).items()}
    assert again == first


@pytest.mark.skipif(not can_fork(), reason="forks are not safe here: each worker imports the app")
def test_workers_are_forks_of_one_process_that_has_imported_the_app(pool):
    workers = pool(count=2)
    answers = replies(workers, [orders(0), orders(1)]).values()
    parents = {answer["parent"] for answer in answers}
    assert len(parents) == 1
    assert {answer["imported-by"] for answer in answers} == parents
    assert parents != {os.getpid()}
    (nursery,) = map(psutil.Process, parents)
    assert nursery.ppid() == os.getpid()
    workers.close()
    assert not nursery.is_running()


@pytest.mark.skipif(not can_fork(), reason="forks are not safe here: each worker imports the app")
def test_workers_whose_common_parent_was_killed_are_replaced(pool):
    workers = pool()
    parent = replies(workers, [orders(0)])["to-0"]["parent"]
    psutil.Process(parent).send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while psutil.pid_exists(workers._workers[0].process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    answers = replies(workers, [orders(0), orders(1)])
    assert answers["to-1"]["place"] == 1


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


SERVER = """
import sys, time
from tests.simulation.test_workers import FIRST, orders, replies
from flwr_distill.simulation.workers import Workers

workers = Workers({FIRST: {"place": 0}}, 1, {}, 1, "tests.simulation.echo:app")
print(replies(workers, [orders(0)])["to-0"]["pid"], workers._folder, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties processes to their parent")
@pytest.mark.usefixtures("pool")
def test_workers_end_with_a_server_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        worker = int(server.stdout.readline().split()[0])
        assert psutil.pid_exists(worker)
        server.kill()
    end = time.monotonic() + 30
    while psutil.pid_exists(worker):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("fork", [True, False])
def test_workers_find_modules_where_the_server_does(pool, monkeypatch, tmp_path, fork):
    monkeypatch.setattr(module, "can_fork", lambda: fork and can_fork())
    monkeypatch.syspath_prepend(tmp_path)
    path = replies(pool(), [orders(0)])["to-0"]["path"]
    assert [*dict.fromkeys(path)] == [*dict.fromkeys(sys.path)]


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc: nothing to keep"
)
def test_workers_use_freed_memory_again(pool):
    assert replies(pool(), [orders(0, allocate=True)])["to-0"]["faults"] < 1_000  # of 97,660 pages


def test_workers_train_without_the_compiler(pool):
    assert replies(pool(app="one_step"), [orders(0)])["to-0"]["compiler"] is False


def test_nothing_stays_in_shared_memory(pool):
    workers = pool()
    replies(workers, [orders(0)])
    folder = workers._folder
    assert not files_in(folder)
    workers.close()
    assert not folder.exists()
    assert all(not os.path.exists(f"/proc/{w.process.pid}") for w in workers._workers)


@pytest.mark.parametrize(("how", "why"), [("die", "SIGKILL"), ("raise", "as ordered")])
def test_what_was_written_of_a_reply_that_failed_is_deleted(pool, how, why):
    workers = pool()
    answers = replies(workers, [orders(0, **{"fail-while-writing": how}), orders(1)])
    assert why in answers["to-0"].reason
    assert not files_in(workers._folder)


def test_workers_that_work_end_together(pool):
    workers = pool(nodes=3, count=3)
    replies(workers, [orders(place) for place in range(3)])
    workers.submit([orders(place, sleep=500) for place in range(3)])
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 9  # and not 5 seconds for each


def test_memory_of_a_server_that_was_killed_is_freed_by_the_next(pool):
    running = pool()
    if running._folder.parent != SHARED_MEMORY:
        pytest.skip(f"{SHARED_MEMORY} has too little room here: models lie on disk")
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        left = Path(server.stdout.readline().split()[1].decode())
        pool()
        assert left.exists()
        server.kill()
    pool()
    assert not left.exists()
    assert running._folder.exists()


def test_a_folder_of_a_killed_server_is_deleted_on_disk_as_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(memory, "MIN_ROOM", 2**80)
    left = tmp_path / f"{memory.PREFIX}left"
    left.mkdir()
    (left / "model").write_bytes(b"of a server that was killed")
    with memory.memory_folder() as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
        with memory.memory_folder():
            assert folder.exists()
    assert not list(tmp_path.iterdir())


def test_a_worker_that_dies_before_it_gets_the_data_set_is_reported(pool, monkeypatch):
    monkeypatch.setattr(module, "can_fork", lambda: False)
    workers = pool()
    kill_group(workers._workers[0].process)
    workers.share(ReadDataset(("digits", "", True, None), b"state", load_dataset("digits")))
    with pytest.raises(WorkerError, match="SIGKILL"):
        replies(workers, [orders(0)])
