"""`flwr-distill up`, `status`, `run` and `stop` on real processes."""

import json
import os
import signal
import socket
import subprocess
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from flwr_distill.base.json_lines import VARIABLE
from flwr_distill.cli.connection import Connection
from flwr_distill.cli.main import app
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.flower.control import KnownRun, RunStatus
from flwr_distill.node.supervisor import status_file
from tests.environments import PROGRAM
from tests.waiting import node_status, wait_until

from .commands import assert_refused


def command(*arguments):
    return [*PROGRAM, *arguments]


def test_status_and_stop_say_when_there_is_no_federation(tmp_path):
    assert_refused(
        CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)]), "no federation runs"
    )
    stop = CliRunner().invoke(app, ["stop", "--state-dir", str(tmp_path)])
    assert stop.exit_code == 0
    assert stop.output == f"no federation runs in {tmp_path}\n"


def test_status_shows_what_each_node_computes_on_and_how_far_a_transfer_is(tmp_path):
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    for number, folder in enumerate(nodes):
        folder.mkdir()
        parts = {"pid": os.getpid(), "online": 5, "device": f"cuda:{number}"}
        parts |= {"moves": "receives 7 of 9 pieces"} if number else {}
        status_file(folder).write_text(json.dumps(parts))
    file = FederationFile(tmp_path)
    file.lock()
    node_dirs = [str(node) for node in nodes]
    file.write(FederationRecord(os.getpid(), "127.0.0.1:1", "home", node_dirs, str(tmp_path)))
    shown = CliRunner().invoke(
        app, ["status", "--state-dir", str(tmp_path)], env={"COLUMNS": "160"}
    )
    file.unlock()
    assert shown.exit_code == 0
    assert "cuda:0" in shown.output
    assert "cuda:1" in shown.output
    assert shown.output.count("7 of 9") == 1


@pytest.mark.parametrize("name", ["up", "demo"])
def test_the_device_of_all_nodes_is_an_option_and_a_node_without_it_ends_the_command(
    name, tmp_path, monkeypatch
):
    requests = []

    def start(self, **more):
        requests.append(self._node_settings["device"])
        raise RuntimeError("node-0 cannot work: device=cuda: ...")

    monkeypatch.setattr(LocalFederation, "start", start)
    monkeypatch.chdir(tmp_path)
    for given in ((), ("--device", "cuda")):
        assert_refused(
            CliRunner().invoke(app, [name, *given]), f"flwr-distill {name}: node-0 cannot work"
        )
    assert requests == ["auto", "cuda"]


def test_each_data_has_a_node_and_a_file_gives_settings_of_all_nodes(tmp_path, monkeypatch):
    nodes: list[dict[str, Any]] = []

    def start(self, **more):
        assert self._port == 5000
        for node in self.nodes:
            with pytest.raises(FileNotFoundError):
                node.start()
            nodes.append(yaml.safe_load((node.state_dir / "node.yaml").read_text()))
        raise RuntimeError("enough")

    monkeypatch.setattr(LocalFederation, "start", start)
    monkeypatch.setattr(LocalFederation, "node_command", lambda *_: missing())
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "all.yaml").write_text("threads: 2\nnode-config: {site: lab}\n")
    options = ("--data", "a", "--data", "b", "--config", "all.yaml", "--port", "5000")
    assert "enough" in CliRunner().invoke(app, ["up", *options]).stderr
    assert [node["data"] for node in nodes] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [node["partition-id"] for node in nodes] == [0, 1]
    assert {(node["threads"], node["node-config"]["site"]) for node in nodes} == {(2, "lab")}


@pytest.mark.parametrize(("config", "is_open"), [("", True), ("policy: standard", False)])
def test_up_says_where_its_nodes_are_open(config, is_open, tmp_path, monkeypatch):
    def end(self):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalFederation, "start", lambda self, **more: None)
    monkeypatch.setattr(LocalFederation, "restart_dead_nodes", end)
    (tmp_path / "all.yaml").write_text(f"threads: 2\n{config}\n")
    result = CliRunner().invoke(app, ["up", "--config", "all.yaml"])
    assert result.exit_code == 0, result.output
    assert ("policy open" in result.output) == is_open
    helped = " ".join(CliRunner().invoke(app, ["up", "--help"]).output.replace("│", " ").split())
    assert "policy open" in helped


@pytest.mark.parametrize(
    ("config", "options", "env", "expected"),
    [
        ("threads: 2", (), {}, "text"),
        ("log-format: json", (), {}, "json"),
        ("log-format: text", ("--log-format", "json"), {}, "json"),
        ("threads: 2", (), {"FLWR_DISTILL_LOG_FORMAT": "json"}, "json"),
    ],
)
def test_all_processes_of_a_federation_have_one_log_format(
    config, options, env, expected, tmp_path, monkeypatch
):
    def start(self, **more):
        raise RuntimeError(f"{self._node_settings['log-format']} {self.env[VARIABLE]}")

    monkeypatch.setattr(LocalFederation, "start", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.yaml").write_text(config + "\n")
    shown = CliRunner().invoke(app, ["up", "--config", "all.yaml", *options], env=env)
    assert f"{expected} {expected}" in shown.stderr


def missing():
    raise FileNotFoundError


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--data", "nowhere"), "nowhere"),
        (("--nodes", "3", "--data", "a"), "nodes = 3"),
        (("--config", "own.yaml"), "config=own.yaml: superlink: up sets it (remove it)"),
        (("--config", "bad.yaml"), "thread"),
        (("--device", "gpu"), "gpu"),
    ],
)
def test_up_refuses_bad_options_in_one_line(options, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "own.yaml").write_text("superlink: host:9092\n")
    (tmp_path / "bad.yaml").write_text("thread: 2\n")
    assert_refused(CliRunner().invoke(app, ["up", *options]), reason)


def test_a_port_that_is_taken_ends_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = ("--state-dir", str(tmp_path))
        result = CliRunner().invoke(app, ["up", "--port", str(min(port, 65533)), *where])
    assert_refused(result, "flwr-distill up: port", port)


class Control:
    """Of a SuperLink with these runs; notes which is stopped."""

    def __init__(self, runs):
        self._runs, self.stopped = runs, list[int]()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def runs(self):
        over = KnownRun(7, RunStatus("finished:failed"), 0.0, 1.0)
        return [over, *(KnownRun(run, RunStatus("running"), 1.0) for run in self._runs)]

    def stop_run(self, run_id):
        self.stopped.append(run_id)


@pytest.mark.parametrize(
    ("runs", "given", "stopped", "reason"),
    [
        ([81, 92], "8", [81], "run 81 is stopped"),
        ([92, 81], "latest", [81], "run 81 is stopped"),
        ([812, 813], "81", [], "812, 813"),
        ([812, 731], "9", [], "no run 9; running: 812 and 731"),
        ([], "999", [], "no run 999; running: none"),
        ([], "latest", [], "no run is running"),
    ],
)
def test_a_run_is_stopped_by_its_first_digits_and_an_unknown_one_is_named_with_those_that_run(
    runs, given, stopped, reason, monkeypatch
):
    control = Control(runs)
    monkeypatch.setattr(Connection, "open", lambda self, timeout: control)
    where = ("--superlink", "127.0.0.1:1", "--insecure")
    result = CliRunner().invoke(app, ["stop", given, *where])
    assert reason in result.output
    assert control.stopped == stopped
    assert result.exit_code == (0 if stopped else 1)


def test_the_version_is_an_option():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"flwr-distill {version('flwr-distill')}\n"


@pytest.mark.deployment("`up`, `status`, `run` and `stop`; a dead node comes back")
@pytest.mark.slow
def test_a_federation_goes_up_mends_a_dead_node_runs_and_is_stopped(tmp_path):
    where = ("--state-dir", str(tmp_path / "state"))
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    up = subprocess.Popen(
        command("up", "--data", str(tmp_path / "own.npz"), *where),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    try:
        assert up.stdout is not None
        wait_for_line(up, b"1 node is online")
        wait_for_line(up, b"flwr-distill run")
        before = node_status(tmp_path / "state" / "node-0")
        shown = subprocess.run(command("status", *where), capture_output=True, text=True)
        assert shown.returncode == 0
        assert "online" in shown.stdout

        os.kill(before["pid"], signal.SIGKILL)
        wait_for_line(up, b"node-0 died: restarted")

        def is_back():
            after = node_status(tmp_path / "state" / "node-0")
            return "online" in after and after["pid"] != before["pid"]

        wait_until(is_back)

        second = subprocess.run(command("up", *where), capture_output=True, text=True)
        assert second.returncode == 1
        assert "already runs" in second.stderr

        settings = 'dataset="private" private.shape="1x8x8" strategy="fedavg" num-rounds=1'
        ran = subprocess.run(
            command("run", "-c", settings, *where), capture_output=True, text=True, cwd=tmp_path
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "round   1/1" in ran.stdout
        assert f"Results in {tmp_path / 'runs'}" in ran.stdout
        bad = 'strategy="nonsense" dataset="digits"'
        ran = subprocess.run(command("run", "-c", bad, *where), capture_output=True, text=True)
        assert ran.returncode == 1
        assert "strategy = 'nonsense': not one of" in ran.stderr
        assert ran.stderr.count("\n") == 1
        assert "Traceback" not in ran.stdout

        assert subprocess.run(command("stop", *where)).returncode == 0
        assert up.wait(timeout=20) == 0
        assert subprocess.run(command("status", *where), capture_output=True).returncode == 1
        assert not processes_that_name(tmp_path)
    finally:
        up.kill()
        up.wait()


def test_a_second_demo_leaves_the_first_one_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalFederation, "start", lambda self, **more: 1 / 0)
    folder = tmp_path / "demo-federation"
    first = FederationFile(folder)
    first.lock()
    (folder / "node-0").mkdir()
    result = CliRunner().invoke(app, ["demo", "--runs-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "already runs" in result.stderr
    assert (folder / "node-0").exists()
    first.unlock()
    CliRunner().invoke(app, ["demo", "--runs-dir", str(tmp_path)])
    assert not (folder / "node-0").exists()


@pytest.mark.deployment("`demo`")
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_the_demo_compares_two_strategies_on_real_nodes_and_leaves_nothing_running(tmp_path):
    asked = command("demo", "--nodes", "2", "--classes", "5", "--rounds", "1")
    ran = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((tmp_path / "runs" / "demo.json").read_text())
    assert list(results) == ["fedavg", "hfldd"]
    assert (tmp_path / "runs" / "demo.html").exists()
    assert not processes_that_name(tmp_path)


def wait_for_line(process, text):
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the command ended before it said {text!r}")


def processes_that_name(directory):
    """Command lines of live processes that name a directory."""
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in lines if str(directory) in line and "pytest" not in line]
