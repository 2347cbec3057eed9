"""MLflow and Weights & Biases get a run's settings, curves, files and model, and never harm it."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version

import pytest
from safetensors.numpy import load_file

from flwr_distill.server import app
from flwr_distill.server.named_hooks import find_hooks
from flwr_distill.server.trackers import tracker
from flwr_distill.server.trackers.tracker import Tracker
from flwr_distill.task.errors import SettingsError
from tests.server.run_folder import read_lines, rows

QUICK = {
    "strategy": "fedavg",
    "num-rounds": 2,
    "min-nodes": 2,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
}
SECRET = "planted-secret-5d1f"
ALONE = """
import contextlib, json, sys, time
from pathlib import Path
from benchmarks import in_process
from flwr_distill.server.trackers import mlflow, tracker, wandb
first_answer, settings = float(sys.argv[1]), json.loads(sys.argv[2])
of_its_length = first_answer / tracker.FIRST_ANSWER
tracker.FIRST_ANSWER = first_answer
for limits in (mlflow.LIMITS, wandb.RUN_ALONE):
    waits = [name for name in limits if name.lower().endswith(("timeout", "timeout_seconds"))]
    for name in waits:
        limits[name] = type(limits[name])(max(1, round(of_its_length * float(limits[name]))))
in_process.only_errors = contextlib.nullcontext  # the log says what is missing there
in_process.run_in_process(settings, [{"num-partitions": 2}] * 2, Path(sys.argv[3]))
print(f"over at {time.time()}.", flush=True)
"""


class Service(Tracker):
    """Notes what it gets; `faults` are called with the name of each call, and may raise or wait."""

    package = "json"

    def __init__(self, fault=lambda call: None):
        super().__init__()
        self.calls, self._fault = [], fault

    def _note(self, call, what):
        self._fault(call)
        self.calls.append((call, what))

    def open(self, run, settings):
        self._note("open", settings)

    def log(self, numbers, step):
        self._note("log", (step, numbers))

    def close(self, files, model, *, failed):
        model = model and (model, {file.name for file in model.folder.iterdir()})
        self._note("close", ({file.name for file in files}, model, failed))

    def got(self, name):
        return [what for call, what in self.calls if call == name]


@pytest.fixture
def track(play, monkeypatch, caplog):
    """Run our ServerApp with a tracker; give the run's folder and its warnings."""

    def track(service, **settings):
        monkeypatch.setattr(app, "find_hooks", lambda names: {"service": service})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flwr"):
            folder = play(QUICK, nodes=2, **settings)
        texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return folder, [text for text in texts if text.startswith("json")]

    return track


def test_a_service_gets_settings_each_round_files_and_the_model_with_its_card(track):
    service = Service()
    folder, warnings = track(service)
    assert warnings == []
    (settings,) = service.got("open")
    assert settings["train.local-epochs"] == 1
    assert [(step, numbers["accuracy"]) for step, numbers in service.got("log")] == [
        (row["round"], row["accuracy"]) for row in rows(folder)
    ]
    ((files, (model, in_folder), failed),) = service.got("close")
    assert not failed
    assert files >= {"report.html", "settings.json", "summary.json", "metrics.jsonl"}
    assert not [name for name in files if name.endswith(".safetensors")]
    assert in_folder == {"model.safetensors", "model-card.md"}
    assert model.name == "fedavg-digits"
    assert model.card.startswith("# fedavg on digits")


def test_what_could_not_be_sent_is_sent_later(track):
    failed = []

    def fault(call):
        if call != "close" and call not in failed:
            failed.append(call)
            raise OSError(f"no {call} now, ask https://user:{SECRET}@host")

    service = Service(fault)
    folder, (warning,) = track(service, num_rounds=4)
    assert "json does not take this run's numbers" in warning
    assert "OSError" in warning
    assert SECRET not in warning
    assert failed == ["open", "log"]
    assert [step for step, _ in service.got("log")] == [row["round"] for row in rows(folder)]
    assert len(service.got("close")) == 1


@pytest.mark.parametrize(
    ("hangs_in", "bound"), [("open", "FIRST_ANSWER"), ("log", "UPLOAD"), ("close", "UPLOAD")]
)
def test_a_service_that_hangs_costs_the_end_of_a_run_a_bounded_wait(
    track, monkeypatch, hangs_in, bound
):
    monkeypatch.setattr(tracker, bound, 0.5)
    is_over = threading.Event()
    service = Service(lambda call: call == hangs_in and is_over.wait(60))
    folder, (warning,) = track(service)
    is_over.set()
    assert "json does not have all of this run (no answer in 0 s)" in warning
    assert str(folder) in warning
    assert (folder / "summary.json").exists()


def test_a_service_that_always_fails_is_named_at_the_start_and_at_the_end(track):
    def fault(call):
        raise ValueError("no\x1b[2J")

    folder, (first, last) = track(Service(fault))
    assert "json does not take" in first
    assert "json does not have all of this run (ValueError: no" in last
    assert "\x1b" not in first + last
    plain, _ = track(Service(), run_id=8)
    models = [load_file(each / "model.safetensors") for each in (folder, plain)]
    assert all((models[0][name] == models[1][name]).all() for name in models[0])


def test_a_run_that_fails_is_failed_there_and_has_its_files(track):
    def broken(node, message):
        return message.metadata.message_type == "train"

    service = Service()
    with pytest.raises(Exception, match=r"nothing was learnt|failed round"):
        track(service, broken=broken)
    ((files, model, failed),) = service.got("close")
    assert failed
    assert model is None
    assert "report.html" in files


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_that_is_missing_is_named_before_any_node_is_asked(name, monkeypatch):
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    remedy = rf"hooks = '{name}'.*pip install 'flwr-distill\[{name}\]'"
    with pytest.raises(SettingsError, match=remedy):
        find_hooks(name)


def run_alone(folder, limit=30, env=None, **settings):
    """A run in a process of its own, where services may keep what they want; also its output.

    All waits for a service are as many times shorter or longer as `limit` is than `FIRST_ANSWER`.
    """
    config = {**QUICK, "hooks": "mlflow,wandb", "runs-dir": str(folder / "runs"), **settings}
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "WANDB_"))}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(limit), json.dumps(config), str(folder / "runs")],
        env={
            **own,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            **(env or {}),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return folder / "runs" / "1", output


@pytest.mark.slow
def test_the_real_packages_have_all_of_a_run_and_of_the_one_that_resumes_it(tmp_path):
    """MLflow in a database such as its server has; Weights & Biases offline."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    folder, output = run_alone(tmp_path, limit=120)
    assert "does not have all" not in output
    run_alone(tmp_path, limit=120, resume="1", **{"num-rounds": 3})

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = mlflow.search_runs(experiment_names=["flwr-distill"], output_format="list")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fedavg on digits")
    assert run.data.params["train.local-epochs"] == "1"
    client = mlflow.MlflowClient()
    curve = client.get_metric_history(run.info.run_id, "accuracy")
    assert {point.step: point.value for point in curve} == {
        row["round"]: row["accuracy"] for row in rows(folder)
    }
    assert len(rows(folder)) == 4
    assert {"macro_f1", "class_accuracy/0", "server_bytes"} <= set(run.data.metrics)
    sent = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "metrics.jsonl", "settings.json", "model"} <= sent
    versions = client.search_model_versions("name = 'fedavg-digits'")
    assert {each.run_id for each in versions} == {run.info.run_id}
    assert len(versions) == 2
    assert all(each.description.startswith("# fedavg on digits") for each in versions)
    path = client.download_artifacts(run.info.run_id, "model/model.safetensors", tmp_path)
    own, there = load_file(folder / "model.safetensors"), load_file(path)
    assert all((own[name] == there[name]).all() for name in own)

    files = list(tmp_path.glob("wandb/offline-run-*/run-1.wandb"))
    assert len(files) == 2
    content = b"".join(file.read_bytes() for file in files)
    for text in ("train.local-epochs", "class_accuracy/0", "report.html", "model-card.md"):
        assert text.encode() in content, text
    for text in ("fedavg-digits", "# fedavg on digits", "flwr-distill"):
        assert text.encode() in content, text
    machine = [sys.executable, f"torch=={version('torch')}", "Results in"]
    assert not list(tmp_path.glob("wandb/*/files/wandb-metadata.json"))
    kept = [file for file in tmp_path.glob("wandb/*/files/*") if file.is_file()]
    everything = content + b"".join(file.read_bytes() for file in kept)
    assert not [text for text in machine if text.encode() in everything]


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_real_packages_whose_service_refuses_or_hangs_neither_fail_a_run_nor_its_process(
    hangs, tmp_path
):
    """A port that refuses calls, or one that takes them and never answers."""
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if hangs:
            listener.listen(100)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        env = {
            "MLFLOW_TRACKING_URI": f"http://user:{SECRET}@{address}",
            "WANDB_BASE_URL": f"http://{address}",
            "WANDB_API_KEY": SECRET + "0" * 40,
            "WANDB_MODE": "online",
        }
        folder, output = run_alone(tmp_path, limit=3, env=env)
        (over,) = re.findall(r"over at (\d+)", output)
        at_exit = time.time() - int(over)
    for name in ("mlflow", "wandb"):
        assert f"{name} does not have all of this run" in output, output
    assert SECRET not in output
    assert SECRET not in "".join(map(str, read_lines(folder / "journal.jsonl")))
    assert at_exit < 90  # packages wait at the end of a process, by default for minutes
