"""`flwr-distill up`, `status` and `down` on real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from cli.main import app
from fleet.federation_record import FederationFile, FederationRecord
from fleet.local_federation import LocalFederation
from node.supervisor import status_file


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "flwr-distill"), *arguments]


def test_status_and_down_say_when_there_is_no_federation(tmp_path: Path) -> None:
    status = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert status.exit_code == 1
    assert "no federation runs" in status.output
    down = CliRunner().invoke(app, ["down", "--state-dir", str(tmp_path)])
    assert down.exit_code == 0
    assert down.output == f"no federation runs in {tmp_path}\n"


def test_status_shows_what_each_node_computes_on(tmp_path: Path) -> None:
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    for number, folder in enumerate(nodes):
        folder.mkdir()
        parts = {"pid": os.getpid(), "online": 5, "device": f"cuda:{number}"}
        status_file(folder).write_text(json.dumps(parts))
    file = FederationFile(tmp_path)
    file.lock()
    file.write(FederationRecord(os.getpid(), "127.0.0.1:1", "home", [str(node) for node in nodes]))
    shown = CliRunner().invoke(
        app, ["status", "--state-dir", str(tmp_path)], env={"COLUMNS": "120"}
    )
    file.unlock()
    assert shown.exit_code == 0
    assert "cuda:0" in shown.output
    assert "cuda:1" in shown.output


@pytest.mark.parametrize("name", ["up", "demo"])
def test_the_device_of_all_nodes_is_an_option_and_a_node_without_it_ends_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def start(self: LocalFederation) -> None:
        asked.append(self._node_settings["device"])
        raise RuntimeError("node 0 cannot work: device=cuda: ...")

    monkeypatch.setattr(LocalFederation, "start", start)
    monkeypatch.chdir(tmp_path)
    for given in ((), ("--device", "cuda")):
        result = CliRunner().invoke(app, [name, *given])
        assert result.exit_code == 1
        assert f"flwr-distill {name}: node 0 cannot work" in result.stderr
    assert asked == ["auto", "cuda"]


@pytest.mark.slow
def test_a_federation_goes_up_mends_a_dead_node_and_goes_down(tmp_path: Path) -> None:
    where = ("--state-dir", str(tmp_path))
    up = subprocess.Popen(
        command("up", "--nodes", "1", *where), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert up.stdout is not None
        wait_for_line(up, b"1 nodes are online")
        before = node_status(tmp_path)
        shown = subprocess.run(command("status", *where), capture_output=True, text=True)
        assert shown.returncode == 0
        assert "online" in shown.stdout

        os.kill(before["pid"], signal.SIGKILL)
        wait_for_line(up, b"node 0 had died: started again")
        deadline = time.monotonic() + 60
        while (after := node_status(tmp_path))["pid"] == before["pid"] or "online" not in after:
            assert time.monotonic() < deadline
            time.sleep(0.2)

        second = subprocess.run(command("up", *where), capture_output=True, text=True)
        assert second.returncode == 1
        assert "already runs" in second.stderr

        assert subprocess.run(command("down", *where)).returncode == 0
        assert up.wait(timeout=20) == 0
        assert subprocess.run(command("status", *where), capture_output=True).returncode == 1
        assert not processes_that_name(tmp_path)
    finally:
        up.kill()
        up.wait()


def wait_for_line(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the command ended before it said {text!r}")


def node_status(state_dir: Path) -> dict[str, int]:
    status: dict[str, int] = json.loads(status_file(state_dir / "node-0").read_text())
    return status


def processes_that_name(directory: Path) -> list[str]:
    """Command lines of live processes that name a directory."""
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in lines if str(directory) in line and "pytest" not in line]
