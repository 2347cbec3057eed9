"""Worker processes answer every message, whatever the app does, and if some die."""

import os
import time
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from flwr_distill.simulation import workers as module
from flwr_distill.simulation.workers import WorkerError, Workers

FIRST = 2**64 - 9


@pytest.fixture
def pool(monkeypatch):
    """Opens workers whose app is that of `echo`."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    opened = []

    def open_pool(nodes=2, count=1):
        configs = {FIRST + place: {"place": place} for place in range(nodes)}
        opened.append(Workers(configs, 1, {}, count, "tests.simulation.echo:app"))
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


def test_nothing_stays_in_shared_memory(pool):
    workers = pool()
    replies(workers, [orders(0)])
    folder = Path(workers._memory.name)
    assert not list(folder.iterdir())
    workers.close()
    assert not folder.exists()
    assert all(not os.path.exists(f"/proc/{p.popen.pid}") for p in workers._processes)
