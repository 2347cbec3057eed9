"""The executor at work for a SuperNode's real API for apps, in this process, with and without TLS.

On the Flower of the lock, and on another with a folder of its own (`make test-flower`).
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_distill.node import stock

if stock.is_stock():
    pytest.skip("Flower's own SuperNode starts its apps here", allow_module_level=True)

from flwr_distill.flower import executor as node_executor
from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.guarding import Guarding
from flwr_distill.flower.lines import module_of_line
from flwr_distill.node.codec import NodeCodec
from flwr_distill.node.guard import Guard
from flwr_distill.node.log_lines import OutputQuota
from flwr_distill.node.policy import OPEN
from flwr_distill.node.settings import FLOWER_HOME
from tests.node.supernodes import (
    SuperNode,
    answer,
    running_executor,
    wait_until,
    wait_until_gone,
)

appio = module_of_line("node", "appio")
WORKERS_OWN = {"flower", "node"}
pytestmark = [pytest.mark.faults, pytest.mark.deployment("the node's executor")]


@pytest.fixture
def idle() -> Iterator[SuperNode]:
    """A SuperNode without a run."""
    supernode = SuperNode()
    yield supernode
    supernode.close()


@pytest.fixture
def node(idle: SuperNode, tiny_app: Path) -> SuperNode:
    """A SuperNode with a run of the tiny app."""
    idle.submit(tiny_app)
    return idle


@pytest.fixture
def make_executor(
    idle: SuperNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Start an executor in this process, with a child that ends with the test."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / FLOWER_HOME))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[tuple[Any, int]] = []

    def make(**more: Any) -> Any:
        guarding = Guarding(Guard(OPEN, tmp_path, {}, run_config_of))
        api = appio.AppIo(idle.address, None)
        executor: Any = node_executor.Executor(api, [], guarding, NodeCodec(tmp_path), **more)
        started.append((executor, executor._child.pid))
        return executor

    yield make
    for executor, child in started:
        executor.close()
        wait_until_gone(child)


def serve_one(executor: Any) -> float:
    """Have an executor serve its next task; the seconds that it took."""
    while (token := executor._api.claim()) is None:
        time.sleep(0.02)
    start = time.monotonic()
    executor._serve_task(token)
    return time.monotonic() - start


def test_tasks_are_served_over_tls_and_a_large_message_passes(
    certificates: Any, tiny_app: Path, tmp_path: Path
) -> None:
    node = SuperNode(certificates)
    node.submit(tiny_app)
    with running_executor(node, tmp_path, "--root-certificates", str(certificates.authority)):
        first = node.ask(payload=b"x" * 30_000_000)
        assert node.ask()["pid"] == first["pid"]
    node.close()


def test_a_message_may_come_after_its_task(node: SuperNode, tmp_path: Path) -> None:
    with running_executor(node, tmp_path):
        first = node.ask()  # from here on it polls for tasks many times a second
        assert node.ask(late=1.0)["pid"] == first["pid"]


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc: nothing to keep"
)
def test_a_worker_keeps_freed_memory_during_a_message_and_gives_it_back_after(
    node: SuperNode, tmp_path: Path
) -> None:
    with running_executor(node, tmp_path):
        worker = psutil.Process(node.ask()["pid"])
        before = worker.memory_info().rss
        assert node.ask("allocate")["faults"] < 1_000  # 40 MB of new memory are 9,766 pages
        wait_until(lambda: worker.memory_info().rss < before + 20_000_000)


def test_an_idle_node_holds_no_torch_and_goes_on_with_the_next_message(
    node: SuperNode, tmp_path: Path
) -> None:
    arguments = ("--release-after", "1", "--preload", "torch")
    with running_executor(node, tmp_path, *arguments) as executor:
        before = node.ask()
        assert holds_torch(before["pid"])
        wait_until_gone(before["pid"])
        assert psutil.Process(executor.pid).children() == []
        assert not holds_torch(executor.pid)
        after = node.ask()
    assert after["pid"] != before["pid"]
    assert after["count"] == before["count"] + 1  # the context lives in the SuperNode


def test_a_node_that_has_had_no_message_holds_no_torch_either(
    idle: SuperNode, tmp_path: Path
) -> None:
    arguments = ("--release-after", "0.1", "--preload", "torch")
    with running_executor(idle, tmp_path, *arguments) as executor:
        process = psutil.Process(executor.pid)
        wait_until(lambda: process.children() != [])
        wait_until(lambda: process.children() == [])
        assert executor.poll() is None


def test_one_that_is_kept_warm_makes_room_for_a_fresh_one(node: SuperNode, tmp_path: Path) -> None:
    arguments = ("--release-after", "1", "--keep-warm")
    with running_executor(node, tmp_path, *arguments) as executor:
        before = node.ask()
        wait_until_gone(before["pid"])
        wait_until(lambda: psutil.Process(executor.pid).children() != [])
        (fresh,) = psutil.Process(executor.pid).children()
        time.sleep(1.5)
        after = node.ask()
    assert after["pid"] == fresh.pid
    assert after["count"] == before["count"] + 1


def test_a_child_killed_while_idle_is_replaced(node: SuperNode, tmp_path: Path) -> None:
    with running_executor(node, tmp_path):
        before = node.ask()["pid"]
        time.sleep(1.0)  # until it is idle: its last note comes after the reply
        os.kill(before, signal.SIGKILL)
        node.send()
        reply = node.reply()
        if reply.has_error():  # the executor had not noticed yet
            assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
            node.send()
            reply = node.reply()
        assert answer(reply)["pid"] != before


def test_after_an_error_that_cuda_does_not_recover_from_the_next_message_finds_a_fresh_child(
    node: SuperNode, tmp_path: Path
) -> None:
    with running_executor(node, tmp_path):
        before = node.ask()["pid"]
        node.send("lose")
        failed = node.reply()
        assert failed.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert "lost" in str(failed.error.reason)
        assert node.ask()["pid"] != before
        wait_until_gone(before)


def test_a_reply_that_nobody_waits_for_any_more_is_not_sent(
    node: SuperNode, tmp_path: Path
) -> None:
    with running_executor(node, tmp_path):
        node.send("sleep", ttl=2.0)
        reply = node.reply()
    assert reply.has_error()
    assert "is late after 2 s" in str(reply.error.reason)


def test_a_hung_child_is_killed_and_answered_for_and_the_next_message_finds_another(
    node: SuperNode, make_executor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_executor, "GRACE", 0.5)
    node.send()
    executor = make_executor()
    before = executor._child.pid
    serve_one(executor)
    assert answer(node.reply())["pid"] == before
    node.send("sleep", ttl=0.5)  # for 8 s
    assert serve_one(executor) < 5
    hung = node.reply()
    assert hung.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert "hung, and was killed" in str(hung.error.reason)
    node.send()
    serve_one(executor)
    assert answer(node.reply())["pid"] == executor._child.pid != before


def test_the_app_of_a_run_that_has_ended_is_killed_and_the_next_message_finds_another(
    node: SuperNode, make_executor: Callable[..., Any]
) -> None:
    node.send("sleep60")
    executor = make_executor()
    busy = executor._child.pid

    def end_tasks() -> None:
        for task in node.state.get_tasks(run_ids=[1]):
            node.state.finish_task(task.task_id, SubStatus.STOPPED, "")

    threading.Timer(1.0, end_tasks).start()
    assert serve_one(executor) < 10
    assert not node.replies()
    node.send()
    serve_one(executor)
    assert answer(node.reply())["pid"] == executor._child.pid != busy


class Fills:
    """A sandbox that is none, whose app keeps too much from a certain check on."""

    command = ()
    title = "app"

    def __init__(self, checks: int) -> None:
        self.checks = checks
        self.quota = OutputQuota()

    def of_no_run(self) -> "Fills":
        return self

    def of_run(self, run_id: int, bundle: str) -> "Fills":
        return self

    def excess(self) -> str:
        self.checks -= 1
        return "most-disk: a lot" if self.checks <= 0 else ""


@pytest.mark.parametrize("checks", [1, 3], ids=["before it works", "while it works"])
def test_an_app_that_keeps_too_much_is_ended_and_its_message_answered(
    node: SuperNode, make_executor: Callable[..., Any], checks: int
) -> None:
    node.send("sleep")  # for 8 s
    executor = make_executor(sandboxes=Fills(checks))
    assert serve_one(executor) < 7
    error = node.reply().error
    assert error.code == ErrorCode.CLIENT_APP_CRASHED
    assert "most-disk" in str(error.reason)
    assert executor._child is None


def test_an_app_that_goes_on_writing_between_messages_is_ended_too(
    make_executor: Callable[..., Any],
) -> None:
    executor = make_executor(sandboxes=Fills(2))
    before = executor._child.pid
    executor._check_idle_child()
    assert executor._child.pid == before
    executor._check_idle_child()  # though it is not warm yet
    assert executor._child is None


def test_tasks_are_claimed_by_those_who_know_the_nodes_secret_alone(
    tiny_app: Path, tmp_path: Path
) -> None:
    """The API is on loopback, where any user of the machine reaches it."""
    node = SuperNode(secret=b"s" * 32)
    node.submit(tiny_app)
    node.send()
    for secret in (None, b"guessed"):
        with pytest.raises(appio.REFUSED, match=r"UNAUTHENTICATED|401"):
            appio.AppIo(node.address, None, secret).claim()
    file = tmp_path / "secret"
    file.write_bytes(b"s" * 32)
    with running_executor(node, tmp_path, "--secret-file", str(file)):
        assert answer(node.reply())["greeting"] == "hello"
    node.close()


def test_a_reply_that_went_out_before_its_last_objects_came_is_no_failure(
    node: SuperNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the SuperLink has an object already: the SuperNode does not wait for it."""
    with running_executor(node, tmp_path):
        first = node.ask()
        preregister = node.objects.preregister
        seen = []

        def preregister_and_let_go(run_id: int, tree: Any) -> Any:
            missing = preregister(run_id, tree)
            seen.append(tree.object_id)
            if len(seen) == 2:  # the message, then its reply
                node.objects.delete(tree.object_id)
            return missing

        with monkeypatch.context() as patch:
            patch.setattr(node.objects, "preregister", preregister_and_let_go)
            node.send()
            while not (replies := node.replies()):
                time.sleep(0.02)
        assert seen[1:] == [replies[0].metadata.message_id]
        assert node.ask()["pid"] == first["pid"]


def test_of_the_context_that_an_app_hands_back_its_state_alone_counts(
    node: SuperNode, tmp_path: Path
) -> None:
    """Flower keeps it: the next message's data and settings would be what the app says."""
    with running_executor(node, tmp_path):
        first = node.ask("change")
        second = node.ask()
    assert second["count"] == first["count"] + 1
    assert "'partition-id': 0" in second["node-config"]


def test_of_a_coded_reply_the_bytes_that_leave_are_booked(
    node: SuperNode, make_executor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array counts once under however many names: else an app could book less than nothing."""
    executor = make_executor()
    coded = {"arrays": ArrayRecord({f"w{i}": Array("float32", (9,), "c", b"xyz") for i in "ab"})}
    monkeypatch.setattr(executor._codec, "encode", lambda reply: coded)
    release, booked = executor._guarding.release, []

    def booking(reply: Message, num_bytes: int) -> Message:
        leaving = Message(RecordDict({**reply.content, **coded}), reply_to=reply)
        objects = get_all_nested_objects(leaving)
        parts = [objects[name].deflate() for name in objects if name != leaving.object_id]
        booked.append(num_bytes - sum(map(len, parts)))
        return release(reply, num_bytes)

    monkeypatch.setattr(executor._guarding, "release", booking)
    node.send()
    serve_one(executor)
    assert 0 < booked[0] < 200  # the message itself, which has other metadata
    assert answer(node.reply())


def test_an_app_that_hands_back_no_reply_loses_its_process_and_its_node_nothing(
    node: SuperNode, tmp_path: Path
) -> None:
    with running_executor(node, tmp_path) as executor:
        before = node.ask()["pid"]
        node.send("forge")
        failed = node.reply()
        assert failed.error.code == ErrorCode.CLIENT_APP_CRASHED
        assert "malformed" in str(failed.error.reason)
        assert node.ask()["pid"] != before
        assert executor.poll() is None


def test_two_runs_of_different_apps_never_share_a_process(
    node: SuperNode, tmp_path: Path, rewrite_tiny_app: Callable[..., None]
) -> None:
    other_app = tmp_path / "other"
    other_app.mkdir()
    rewrite_tiny_app(other_app, greeting="bonjour")
    node.submit(other_app, run_id=2)
    with running_executor(node, tmp_path):
        replies = [node.ask(run_id=run_id) for run_id in (1, 2, 1)]
    assert [reply["greeting"] for reply in replies] == ["hello", "bonjour", "hello"]
    assert len({reply["pid"] for reply in replies}) == 3


def test_a_run_after_a_package_was_installed_gets_a_fresh_process_that_can_import_it(
    node: SuperNode, tiny_app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    node.submit(tiny_app, run_id=2)

    def process_of(run_id: int) -> int:
        return int(node.ask(run_id=run_id)["pid"])

    with running_executor(node, tmp_path / "home"):
        first = process_of(1)
        assert process_of(2) == first
        (site / "someones-1.0.dist-info").mkdir()
        assert process_of(2) == first  # a run continues as it began
        fresh = process_of(1)
        assert fresh != first
        (site / "someones-1.0.dist-info").rename(site / "someones-2.0.dist-info")
        assert process_of(2) != fresh
        assert process_of(2) == process_of(1)


def test_an_app_may_bring_packages_that_are_called_as_ours(
    idle: SuperNode, tmp_path: Path, rewrite_tiny_app: Callable[..., None]
) -> None:
    app_dir = tmp_path / "app"
    app_dir.mkdir()
    rewrite_tiny_app(app_dir)
    names = ("client", "server", "strategies", "protocol")
    for name in names:
        (app_dir / name).mkdir()
        (app_dir / name / "__init__.py").write_text("")
        (app_dir / name / "registry.py").write_text(f'WHOSE = "the bundle\'s {name}"')
    code = app_dir / "tiny" / "client.py"
    imports = "".join(f"import {name}.registry\n" for name in names)
    greeting = "', '.join(m.registry.WHOSE for m in (client, server, strategies, protocol))"
    code.write_text(imports + code.read_text().replace("'hello'", greeting))
    code.rename(app_dir / "client" / "app.py")
    settings = app_dir / "pyproject.toml"
    settings.write_text(settings.read_text().replace("tiny.client:app", "client.app:app"))
    idle.submit(app_dir)
    with running_executor(idle, tmp_path):
        greeting = idle.ask()["greeting"]
    assert greeting == ", ".join(f"the bundle's {name}" for name in names)


def test_an_app_cannot_replace_its_workers_own_code(
    idle: SuperNode, tmp_path: Path, rewrite_tiny_app: Callable[..., None]
) -> None:
    app_dir = tmp_path / "app"
    app_dir.mkdir()
    rewrite_tiny_app(app_dir)
    package = app_dir / "flwr_distill"
    for name in WORKERS_OWN:
        (package / name).mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / name / "__init__.py").write_text("IS_THE_APPS = True")
        (package / name / "kernel.py").write_text("IS_THE_APPS = True")
    code = app_dir / "tiny" / "client.py"
    imports = "from flwr_distill import flower, node\nfrom flwr_distill.node import kernel\n"
    greeting = "str([hasattr(m, 'IS_THE_APPS') for m in (flower, node, kernel)])"
    code.write_text(imports + code.read_text().replace("'hello'", greeting))
    idle.submit(app_dir)
    with running_executor(idle, tmp_path):
        assert idle.ask()["greeting"] == "[False, False, False]"


def test_a_worker_imports_no_package_of_ours_but_its_own() -> None:
    """So that the bundle's are found, whichever it brings."""
    code = "import sys, flwr_distill.flower.worker; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split()
    ours = [name.split(".") for name in imported if name.startswith("flwr_distill.")]
    assert {room for _, room, *_ in ours} == WORKERS_OWN


def test_a_task_whose_message_is_gone_ends_the_executor_for_it_cannot_be_answered(
    node: SuperNode, tmp_path: Path
) -> None:
    node.state.create_task(
        task_type=TaskType.CLIENT_APP, run_id=1, fab_hash=node.state.get_run(1).fab_hash
    )
    with running_executor(node, tmp_path) as executor:
        _, errors = executor.communicate(timeout=60)
        assert executor.returncode == 1
        assert "refused to serve a task" in errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preload", "no_such_module"], r"preload=no_such_module: it cannot be imported"),
        (["--device", "cuda:99"], r"device=cuda:99: this machine has \d+ CUDA devices"),
    ],
)
def test_a_machine_that_cannot_do_the_work_is_told_from_one_that_can(
    idle: SuperNode, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    with running_executor(idle, tmp_path, *arguments) as executor:
        _, errors = executor.communicate(timeout=60)
        assert executor.returncode == 1
        assert re.search(reason, errors)


def holds_torch(pid: int) -> bool:
    return any("libtorch" in region.path for region in psutil.Process(pid).memory_maps())
