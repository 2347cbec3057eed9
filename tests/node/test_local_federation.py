"""What a local federation promises to those who run apps on it."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.federation_record import FederationFile, FederationRecord, FederationRunsError
from fleet.local_federation import LocalFederation
from fleet.submission import RunError


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
    record = FederationRecord(1, "127.0.0.1:1", "home", ["node-0"])
    first, second = FederationFile(tmp_path), FederationFile(tmp_path)
    assert second.read() is None
    first.lock()
    first.write(record)
    with pytest.raises(FederationRunsError, match="already runs in"):
        second.lock()
    assert second.read() == record
    first.unlock()
    assert second.read() is None
    second.lock()
    second.unlock()


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
