"""Our nodes on real processes: new code, errors, and parts that are killed in mid-run."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.common.constant import ErrorCode

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.fleet.submission import RunError
from flwr_distill.node.nursery import NURSERY
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def kill_at(phase: int, victim: Callable[[], int]) -> Callable[[str], None]:
    """When a phase has begun and its messages are being worked on, kill a process with -9."""

    def on_line(line: str) -> None:
        if line == f"BEGIN {phase}":
            time.sleep(2)
            os.kill(victim(), signal.SIGKILL)

    return on_line


def wait_until_back(tiny: Any, index: int, other_than: int = -1) -> None:
    def is_back() -> bool:
        with suppress(FileNotFoundError):
            status = tiny.status(index)
            return {"online", "ready"} <= status.keys() and status["pid"] != other_than
        return False

    wait_until(is_back, 60)


def pids(phase: dict[str, Any]) -> set[int]:
    return {reply.answer["pid"] for reply in phase.values()}


def test_one_process_serves_all_messages_of_a_node_with_its_context_and_settings(
    tiny: Any,
) -> None:
    results = tiny.run({"phases": 4, "nodes": 2})
    assert len(results) == 4
    assert all(pids(phase) == pids(results[0]) for phase in results)
    assert pids(results[0]) == {tiny.status(0)["worker"], tiny.status(1)["worker"]}
    for number, phase in enumerate(results, start=1):
        assert {reply.answer["count"] for reply in phase.values()} == {number}
    for reply in results[0].values():
        assert reply.answer["threads"] == "1"
        assert "'num-partitions': 2" in reply.answer["node-config"]
        assert "'sector': 7" in reply.answer["node-config"]
        assert "'device': 'auto'" in reply.answer["node-config"]  # it preloads no torch
    assert tiny.status(0)["device"] == "auto"


def test_code_of_a_new_submission_is_what_runs(
    tiny: Any, tmp_path: Path, rewrite_tiny_app: Callable[..., None]
) -> None:
    nodes = {tiny.status(index)["pid"] for index in (0, 1)}
    rewrite_tiny_app(tmp_path, greeting="bonjour")
    (phase,) = type(tiny)(tiny.federation, tmp_path).run({"phases": 1, "nodes": 2})
    assert {reply.answer["greeting"] for reply in phase.values()} == {"bonjour"}
    assert nodes == {tiny.status(index)["pid"] for index in (0, 1)}
    (phase,) = tiny.run({"phases": 1, "nodes": 2})
    assert {reply.answer["greeting"] for reply in phase.values()} == {"hello"}


def test_a_run_that_is_stopped_leaves_its_nodes_free_for_the_next(tiny: Any) -> None:
    nodes = {tiny.status(index)["pid"] for index in (0, 1)}
    began: list[float] = []
    with pytest.raises(RunError, match="stopped"):
        tiny.federation.run(
            tiny.app_dir,
            {"phases": 1, "nodes": 2, "do": "sleep250"},
            on_line=lambda line: began.append(time.monotonic()) if "BEGIN" in line else None,
            timeout=10,
        )
    assert began
    (phase,) = tiny.run({"phases": 1, "nodes": 2})
    assert [reply.error for reply in phase.values()] == [0, 0]
    assert time.monotonic() - began[0] < 60
    assert nodes == {tiny.status(index)["pid"] for index in (0, 1)}


def test_an_app_that_fails_is_answered_for_at_once_and_the_rest_goes_on(tiny: Any) -> None:
    results = tiny.run({"phases": 4, "nodes": 2, "do": "raise nothing exit"})
    expected = [
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "as asked"),
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "not a Message"),
        (ErrorCode.CLIENT_APP_CRASHED, "exit code 3"),
    ]
    for phase, (code, reason) in zip(results, expected, strict=False):
        failed = [reply for reply in phase.values() if reply.error]
        assert len(phase) == 2
        assert [reply.error for reply in failed] == [code]
        assert reason in failed[0].answer["reason"]
        assert failed[0].after < 10
    assert not any(reply.error for reply in results[3].values())


def test_a_child_killed_in_mid_train_is_an_error_within_5_s_and_back_in_the_next_phase(
    tiny: Any,
) -> None:
    on_line = kill_at(1, lambda: tiny.status(0)["worker"])
    results = tiny.run({"phases": 3, "nodes": 2, "do": "work sleep"}, on_line)
    (failed,) = [reply for reply in results[1].values() if reply.error]
    assert failed.error == ErrorCode.CLIENT_APP_CRASHED
    assert "SIGKILL" in failed.answer["reason"]
    assert failed.after < 2 + 5  # killed 2 s after the phase began
    assert not any(reply.error for reply in results[2].values())
    assert results[2].keys() == results[0].keys()


@pytest.mark.parametrize("part", ["executor", "supernode"])
def test_a_killed_part_restarts_and_the_run_goes_on_meanwhile(tiny: Any, part: str) -> None:
    on_line = kill_at(1, lambda: tiny.status(0)[part])
    results = tiny.run({"phases": 2, "nodes": 1, "do": "work sleep", "timeout": 15.0}, on_line)
    healthy = [reply for reply in results[1].values() if not reply.error]
    assert len(healthy) == 1
    wait_until_back(tiny, 0)
    (phase,) = tiny.run({"phases": 1, "nodes": 2})
    assert sum(not reply.error for reply in phase.values()) == 2


def test_a_node_killed_whole_leaves_no_process_and_comes_back(tiny: Any) -> None:
    tiny.run({"phases": 1, "nodes": 2})  # a worker starts with the first message
    before = tiny.status(1)
    tiny.federation.nodes[1].kill()
    parts = [before[name] for name in ("supernode", "executor", "worker")]
    wait_until(lambda: not any(_runs(pid) for pid in parts), 15)
    assert tiny.federation.restart_dead_nodes() == [tiny.federation.nodes[1]]
    wait_until_back(tiny, 1, other_than=before["pid"])
    (phase,) = tiny.run({"phases": 1, "nodes": 2})
    assert sum(not reply.error for reply in phase.values()) == 2


def test_a_link_keeps_to_its_rate_and_its_quiet_hours_and_says_how_far_a_transfer_is(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of these nodes: they stay limited."""
    command, start = tiny.federation.node_command, datetime.now()
    end = start + timedelta(seconds=10)
    limits = {
        "node-0": "max-rate: 24\n",  # 3 MB/s
        "node-1": f"quiet-hours: {start:%H:%M:%S}-{end:%H:%M:%S}\n",
    }

    def limited(file: Path) -> list[str]:
        file.write_text(file.read_text() + limits[file.parent.name])
        return command(file)

    with monkeypatch.context() as patched:
        patched.setattr(tiny.federation, "node_command", limited)
        for node in tiny.federation.nodes:
            node.restart()
    wait_until(lambda: tiny.federation.nodes[1].online, 60)
    wait_until(lambda: "quiet" in tiny.status(1), 10)
    begins: list[datetime] = []

    def on_line(line: str) -> None:
        if line.startswith("BEGIN"):
            begins.append(datetime.now())

    moves = set[object]()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            moves.add(tiny.status(0).get("moves"))

    with ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(watch)
        try:
            quiet, loud = tiny.run({"phases": 2, "nodes": 2, "load": 10}, on_line)
        finally:
            over.set()
    watching.result()
    verbs = {str(line).partition(" ")[0] for line in moves if line}
    assert verbs == {"receives", "sends"}
    assert "moves" not in tiny.status(0)
    slow, other = (str(tiny.status(index)["online"]) for index in (0, 1))
    assert begins[0] + timedelta(seconds=quiet[other].after) > end.replace(microsecond=0)
    assert "quiet" not in tiny.status(1)
    for phase in (quiet, loud):
        assert phase[slow].after > (2 * 10 - 1) / 3  # the last MB is paid for afterwards
    assert loud[other].after < loud[slow].after


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class OnItsOwn(LocalFederation):
    """A node as on a machine of its own."""

    def node_command(self, settings: Path) -> list[str]:
        return ["env", f"--unset={NURSERY}", *super().node_command(settings)]


def test_a_node_on_its_own_rests_wakes_and_outlives_the_process_that_its_parts_come_from(
    tiny: Any, tmp_path: Path
) -> None:
    federation = OnItsOwn(1, tmp_path, node_settings={"preload": [], "release-after": 1})
    with federation:
        alone = type(tiny)(federation, tiny.app_dir)
        wait_until_it_rests(alone)
        first = alone.status(0)
        nursery = psutil.Process(first["nursery"])
        parts = {first["supernode"], first["executor"]}
        assert {child.pid for child in nursery.children()} == parts
        (phase,) = alone.run({"phases": 1, "nodes": 1})
        assert not any(reply.error for reply in phase.values())
        wait_until_it_rests(alone)
        nursery.kill()
        wait_until(lambda: alone.status(0)["starts"] > 1 and "online" in alone.status(0), 60)
        (phase,) = alone.run({"phases": 1, "nodes": 1})
        # The SuperNode had no time to sign off, so the server may think that both are there.
        assert sum(not reply.error for reply in phase.values()) == 1
        left = psutil.Process(federation.nodes[0].pid).children(recursive=True)
        assert first["nursery"] not in {process.pid for process in left}
    assert not any(_runs(process.pid) for process in left)


def wait_until_it_rests(alone: Any) -> None:
    wait_until(lambda: "ready" in alone.status(0) and "worker" not in alone.status(0), 60)
