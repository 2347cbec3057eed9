"""What nodes keep, and for how long: of runs that have ended, of old ones, and their own secret."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal

from flwr_distill.flower.overrides import patch_loop
from flwr_distill.flower.steps import (
    RunEnds,
    StoppedRuns,
    remove_links_of_ended_runs,
)
from flwr_distill.links.folder import LinkFolder
from flwr_distill.node import supervisor
from flwr_distill.node.notes import Notes
from flwr_distill.node.secret import appio_secret
from flwr_distill.node.settings import NodeSettings
from flwr_distill.node.supervisor import Node
from flwr_distill.storage.store import NodeStore
from tests.node.supernodes import SuperNode

ENDED, RUNNING, UNKNOWN = 2**63 + 1, 2, 3


def get_run(run_id: int) -> object:
    """As a SuperNode asks its SuperLink."""
    if run_id == ENDED:
        raise RunNotRunningException
    if run_id == UNKNOWN:
        raise ConnectionError
    return object()


@pytest.fixture(autouse=True)
def flowers_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts Flower's functions back afterwards."""
    for name in ("_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))


@pytest.fixture
def links(tmp_path: Path) -> dict[int, Path]:
    """Folder of a node's links in each run, with a parcel that nobody collected."""
    folders = {}
    for run_id in (ENDED, RUNNING):
        store = NodeStore.open(tmp_path, run_id, 7)
        store.write("model", b"kept")
        LinkFolder(store).private_key()
        folders[run_id] = store.folder / "links"
        (folders[run_id] / "mailbox").mkdir()
        (folders[run_id] / "mailbox" / "parcel").write_bytes(b"uncollected")
    return folders


def test_what_a_run_that_has_ended_left_in_the_mailbox_goes(links: dict[int, Path]) -> None:
    remove_links_of_ended_runs(links[ENDED].parents[3], get_run)
    assert not links[ENDED].exists()
    assert (links[ENDED].parent / "model").exists()
    assert (links[RUNNING] / "mailbox" / "parcel").exists()


def test_a_superlink_that_cannot_say_changes_nothing(tmp_path: Path) -> None:
    store = NodeStore.open(tmp_path, UNKNOWN, 7)
    LinkFolder(store).private_key()
    remove_links_of_ended_runs(tmp_path, get_run)
    assert (store.folder / "links" / "key").exists()


def test_the_supernodes_loop_asks_now_and_then(
    links: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int] = []

    def intake(*, get_run: Any, state: str) -> int:
        return len(state)

    def asking(run_id: int) -> object:
        requests.append(run_id)
        return get_run(run_id)

    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", intake)
    assert patch_loop(RunEnds(links[ENDED].parents[3], every=0.0))
    pull: Any = start_client_internal._pull_and_store_message
    assert pull(get_run=asking, state="abc") == 3
    assert sorted(requests) == [RUNNING, ENDED]
    assert not links[ENDED].exists()
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", intake)
    assert patch_loop(RunEnds(links[ENDED].parents[3], every=60.0))
    pull = start_client_internal._pull_and_store_message
    assert pull(get_run=asking, state="abc") == 3
    assert len(requests) == 2


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Message]]]:
    """Has a SuperNode's loop take a message and wait for the app; returns what it sends."""
    loop: Any = start_client_internal
    node = SuperNode()
    node.state.store_run(Run.create_empty(RUNNING))

    def intake(*, state: Any, **_: Any) -> int:
        message = Message(RecordDict(), 5, "train")
        message.metadata.__dict__["_run_id"] = RUNNING
        loop._insert_message(message, state, node.objects)
        state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUNNING, fab_hash="")
        return RUNNING

    def work(get_run: Callable[[int], object]) -> list[Message]:
        sent: list[Message] = []

        def send(reply: Message, *_: Any) -> set[str]:
            sent.append(reply)
            raise RunNotRunningException

        monkeypatch.setattr(loop, "_pull_and_store_message", intake)
        monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.01)))
        assert patch_loop(StoppedRuns(every=0.05))
        loop._pull_and_store_message(state=node.state, get_run=get_run)
        loop._push_messages(
            state=node.state, object_store=node.objects, send=send, push_object=lambda *_: None
        )
        return sent

    yield work
    assert not getattr(node.state, "get_messages_legacy", node.state.get_messages)()
    tasks = node.state.get_tasks(run_ids=[RUNNING])
    assert [task.status.sub_status for task in tasks] == [SubStatus.STOPPED]
    node.close()


def test_the_apps_work_for_a_run_that_has_ended_ends(working: Callable[..., list[Message]]) -> None:
    answers = iter([object(), ConnectionError(), RunNotRunningException()])

    def get_run(run_id: int) -> object:
        assert run_id == RUNNING
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    (reply,) = working(get_run)
    assert reply.has_error()
    assert next(answers, None) is None


def test_what_runs_left_behind_goes_after_as_many_days_as_the_setting_says(tmp_path: Path) -> None:
    stores = [NodeStore.open(tmp_path, run_id, 7) for run_id in (1, 2)]
    for store, days in zip(stores, (0.9, 1.1), strict=True):
        store.write("model", b"large")
        for path in (store.folder, store.folder / "model"):
            os.utime(path, (time.time() - 86_400 * days,) * 2)
    node = Node(NodeSettings(insecure=True, state_dir=tmp_path, keep_runs=1.0))
    reports, writer = Notes.pair()
    writer.close()
    part: Any = SimpleNamespace(name="mailbox", reports=reports)
    node._parts = [part]
    assert node._wait_for_an_end() == "the mailbox ended"
    assert [store.folder.exists() for store in stores] == [True, False]


def test_old_runs_are_not_searched_for_at_each_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that moves a large model reports every two seconds."""
    searches = []
    monkeypatch.setattr(supervisor, "remove_old_runs", lambda *_: searches.append(1))
    node = Node(NodeSettings(insecure=True, state_dir=tmp_path))
    reports, writer = Notes.pair()
    with writer:
        for number in range(5):
            writer.send("moves", f"sends {number} of 5 pieces")
    part: Any = SimpleNamespace(name="supernode", reports=reports)
    node._parts = [part]
    assert node._wait_for_an_end() == "the supernode ended"
    assert len(searches) == 1


def test_a_secret_is_its_users_alone_and_made_anew_if_a_power_cut_left_it_empty(
    tmp_path: Path,
) -> None:
    file = appio_secret(tmp_path)
    secret = file.read_bytes()
    assert (len(secret), file.stat().st_mode & 0o777) == (32, 0o600)
    assert appio_secret(tmp_path).read_bytes() == secret
    file.write_bytes(b"")
    assert len(appio_secret(tmp_path).read_bytes()) == 32


def test_a_status_that_a_full_disk_does_not_take_ends_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    Node(NodeSettings(insecure=True, state_dir=tmp_path))._write_status()
    assert "node.json is not writable: [Errno 28] No space left" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
