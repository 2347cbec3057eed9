"""What a local federation promises to those who run apps on it."""

import fcntl
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from flwr_distill.fleet.federation_record import (
    FederationFile,
    FederationRecord,
    FederationRunsError,
)
from flwr_distill.fleet.local_federation import LocalFederation, LocalNode
from flwr_distill.fleet.servers import Addresses, serverapps_command
from flwr_distill.fleet.submission import RunError
from flwr_distill.node.nursery import NODE
from flwr_distill.node.secret import appio_secret
from flwr_distill.node.stock import is_another


def test_a_federation_needs_a_node(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_nodes must be at least 1, got 0"):
        LocalFederation(0, tmp_path)


def test_what_was_not_started_says_so(tmp_path: Path) -> None:
    federation = LocalFederation(1, tmp_path)
    with pytest.raises(RuntimeError, match="call start"):
        _ = federation.nodes[0].pid
    with pytest.raises(RuntimeError, match="call start"):
        _ = federation.superlink_pid
    federation.stop()


def test_a_state_directory_holds_one_federation_and_its_record_lives_as_long(
    tmp_path: Path,
) -> None:
    record = FederationRecord(1, "127.0.0.1:1", "home", ["node-0"], "here")
    first, second = FederationFile(tmp_path), FederationFile(tmp_path)
    assert second.read() is None
    first.lock()
    first.write(record)
    with pytest.raises(FederationRunsError, match="already runs"):
        second.lock()
    assert second.read() == record
    first.unlock()
    assert second.read() is None
    second.lock()
    second.unlock()


def test_one_that_reads_the_record_keeps_no_federation_from_starting(tmp_path: Path) -> None:
    """As a dashboard does each second, which locks the file for a moment."""
    file = FederationFile(tmp_path)
    with (tmp_path / "federation.json").open("w") as read:
        fcntl.flock(read, fcntl.LOCK_SH)
        done = threading.Timer(0.2, fcntl.flock, [read, fcntl.LOCK_UN])
        done.start()
        file.lock()
        done.join()
    file.unlock()


def ended_with(folder: Path, settings: str) -> LocalNode:
    """A node that has ended for its settings, by its own main function."""
    file = folder / "node.yaml"
    file.write_text(settings)
    node = LocalNode(0, folder, lambda: subprocess.Popen([sys.executable, "-m", NODE, str(file)]))
    node.start()
    node.process.wait()
    return node


def test_a_node_that_cannot_work_is_not_started_again_but_its_reason_is_said(
    tmp_path: Path,
) -> None:
    federation = LocalFederation(1, tmp_path)
    federation.nodes = [ended_with(tmp_path, "nodes: 7")]
    with pytest.raises(RuntimeError, match="node-0: cannot work: nodes = 7"):
        federation.restart_dead_nodes()


@pytest.mark.parametrize("code", [0, 1])
def test_a_node_that_ended_otherwise_is_started_again_whatever_its_log_says(
    tmp_path: Path, code: int
) -> None:
    federation = LocalFederation(1, tmp_path)
    node = LocalNode(0, tmp_path, lambda: subprocess.Popen(["sh", "-c", f"exit {code}"]))
    node.log.write_text("flwr-distill node: data=/data: cannot be read\n")
    node.start()
    node.process.wait()
    federation.nodes = [node]
    assert federation.restart_dead_nodes() == federation.nodes
    federation.stop()


def test_the_end_of_its_superlink_ends_it_with_the_reason(tmp_path: Path) -> None:
    """Otherwise nodes would call it, and seem online, for ever."""
    federation = LocalFederation(1, tmp_path)
    federation._superlink = subprocess.Popen(["true"])
    federation._superlink.wait()
    with pytest.raises(RuntimeError, match=r"the SuperLink has ended.*superlink\.log.*resume"):
        federation.restart_dead_nodes()
    federation.stop()


def test_what_starts_serverapps_is_started_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next run would wait for ever."""
    federation = LocalFederation(1, tmp_path)
    federation.nodes = []
    federation._serverapps = subprocess.Popen(["true"])
    federation._serverapps.wait()
    monkeypatch.setattr(federation, "_serverapps_command", ["sleep", "60"])
    monkeypatch.setattr(federation, "_start_server", subprocess.Popen)
    assert federation.restart_dead_nodes() == []
    assert federation._serverapps.poll() is None
    federation.stop()


def test_without_what_starts_serverapps_it_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise runs would wait for ever."""
    federation = LocalFederation(1, tmp_path)
    monkeypatch.setitem(federation.env, "PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="flower-superexec is missing"):
        federation._start_server(serverapps_command(Addresses("", "", ""), tmp_path, 1))


@pytest.mark.slow
def test_a_federation_on_gpus_does_not_begin_where_there_are_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    federation = LocalFederation(2, tmp_path, node_settings={"device": "cuda", "preload": []})
    with pytest.raises(RuntimeError, match=r"cannot work: device=cuda: this machine has 0 CUDA"):
        federation.start()


@pytest.mark.slow
def test_the_users_own_flower_configuration_is_left_alone(tiny: Any) -> None:
    home = Path(tiny.federation.env["FLWR_HOME"])
    assert home.is_relative_to(tiny.federation.state_dir)
    listed = subprocess.run(
        ["flwr", "supernode", "list", tiny.federation.connection],
        env=tiny.federation.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.count("online") >= 2


@pytest.mark.slow
def test_tasks_of_serverapps_are_claimed_by_those_who_know_the_federations_secret_alone(
    tiny: Any,
) -> None:
    """The API is on loopback, where any user of the machine reaches it."""
    if is_another():
        pytest.skip("claims tasks over gRPC, as Flower 1.32 does")
    from flwr.proto.appio_pb2 import ClaimTaskRequest, PullPendingTasksRequest
    from flwr.proto.serverappio_pb2_grpc import ServerAppIoStub
    from flwr.supercore.interceptors import (
        RuntimeVersionClientInterceptor,
        SuperExecAuthClientInterceptor,
    )
    from flwr.supercore.interceptors.superexec_auth_interceptor import SERVERAPPIO_SUPEREXEC_METHODS

    log = tiny.federation.superlink_log.read_text()
    (address,) = re.findall(r"ServerAppIo API on (\S+)", log)

    def stub(secret: bytes | None) -> Any:
        interceptors: list[Any] = [RuntimeVersionClientInterceptor("SuperExec")]
        if secret is not None:
            methods = SERVERAPPIO_SUPEREXEC_METHODS
            signing = SuperExecAuthClientInterceptor(
                master_secret=secret, protected_methods=methods
            )
            interceptors.append(signing)
        channel = grpc.insecure_channel(address)
        return ServerAppIoStub(grpc.intercept_channel(channel, *interceptors))

    for secret in (None, b"guessed"):
        stranger = stub(secret)
        for call, request in (
            (stranger.PullPendingTasks, PullPendingTasksRequest()),
            (stranger.ClaimTask, ClaimTaskRequest(task_id=1)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=5)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    known = appio_secret(tiny.federation.state_dir).read_bytes()
    stub(known).PullPendingTasks(PullPendingTasksRequest(), timeout=5)


@pytest.mark.slow
def test_lines_come_as_they_are_printed_and_the_outcome_holds_them_all(tiny: Any) -> None:
    came: list[str] = []
    outcome = tiny.federation.run(tiny.app_dir, "phases=1 nodes=2", on_line=came.append)
    assert outcome.completed
    assert outcome.status == "finished:completed"
    assert came == outcome.lines
    assert "BEGIN 0" in came


@pytest.mark.slow
def test_a_server_app_that_fails_is_an_outcome_and_not_an_exception(
    tiny: Any, tmp_path: Path, rewrite_tiny_app: Callable[..., None]
) -> None:
    rewrite_tiny_app(tmp_path)
    server = tmp_path / "tiny" / "server.py"
    server.write_text(server.read_text().replace("config = context.run_config", "1 / 0"))
    outcome = tiny.federation.run(tmp_path)
    assert outcome.status == "finished:failed"
    assert not outcome.completed


@pytest.mark.slow
def test_a_key_that_the_app_does_not_have_is_refused_with_flowers_reason(tiny: Any) -> None:
    with pytest.raises(RunError, match="rouns"):
        tiny.federation.run(tiny.app_dir, {"rouns": 3})


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_stopped_and_the_nodes_stay_usable(tiny: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match="was stopped after"):
        tiny.federation.run(tiny.app_dir, {"nodes": 99}, timeout=12)
    assert time.monotonic() - start < 40
    (phase,) = tiny.run({"phases": 1, "nodes": 2})
    assert not any(reply.error for reply in phase.values())
