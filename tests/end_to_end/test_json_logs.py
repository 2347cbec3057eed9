"""Logs as JSON, of real processes: one id joins a message's lines, and no secret is in them."""

import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from flwr_distill.base import json_lines
from flwr_distill.cli.main import app
from flwr_distill.fleet.local_federation import LocalFederation
from tests.node.conftest import write_tiny_app

from .runs import submit

TOKEN, PASSWORD = "planted-token-4c1d", "planted-password-9e2f"
PATIENT, CELL = "Planted Patient", "planted cell"
FORGED = '{"text": "forged", "node": "ward-9"}'
TABLE = {
    "dataset": "private",
    "private.classes": "no,yes",
    "private.label": "ill",
    "private.columns": "age",
    "strategy": "fedavg",
    "num-rounds": 1,
    "train.local-epochs": 1,
    "min-nodes": 2,
    "most-samples": 0.0,
}


def write_ward(file, *, broken=False):
    rng = np.random.default_rng(0)
    with file.open("w") as opened:
        table = csv.writer(opened)
        table.writerow(["age", "name", "ill"])
        for place in range(40):
            age = f"{rng.normal(60, 12):.9f}"
            table.writerow([age, f"{PATIENT} {place}", "yes" if place % 2 else "no"])
        if broken:
            table.writerow([CELL, PATIENT, "no"])
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The outcome of a run of three wards, one of whose tables is broken, and its state folder.

    After it an app prints and fails.
    """
    folder = tmp_path_factory.mktemp("json")
    wards = [write_ward(folder / f"{n}.csv", broken=n == 2) for n in range(3)]
    settings = {"log-format": "json", "node-config": {"api-token": TOKEN}}
    hostile = folder / "app"
    hostile.mkdir()
    write_tiny_app(hostile)
    client = hostile / "tiny" / "client.py"
    client.write_text(client.read_text().replace("raise ", f"print({FORGED!r}); raise ", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", TOKEN)
        patch.setenv("https_proxy", f"http://user:{PASSWORD}@proxy.invalid:3128")
        state = folder / "state"
        with LocalFederation(3, state, data=wards, node_settings=settings) as running:
            outcome, _ = submit(running, folder / "runs", TABLE)
            shown = {
                name: CliRunner().invoke(
                    app, ["logs", "latest", *filter(None, [name]), "--state-dir", str(state)]
                )
                for name in ("", "node-1", "ward-9")
            }
            running.run(hostile, {"do": "raise", "phases": 1, "nodes": 3}, timeout=120)
    return outcome, state, wards, shown


def of_file(file):
    lines = [json_lines.read(text) for text in file.read_text().splitlines()]
    assert all(lines), "not all lines are JSON"
    return lines


@pytest.mark.slow
def test_one_id_joins_the_lines_of_a_message_on_server_and_node(run):
    outcome, state, *_ = run
    assert outcome.completed, outcome.lines
    server = [line for text in outcome.lines if (line := json_lines.read(text))]
    assert {line.run for line in server} == {str(outcome.run_id)}
    trained = {line.node: line.message_id for line in server if line.text.startswith("train, ")}
    assert set(trained) == {"node-0", "node-1"}
    for name, message_id in trained.items():
        sent, replied = [line for line in server if line.message_id == message_id]
        assert (sent.text, replied.text) == (f"train, {name}: sent", f"train, {name}: replied")
        lines = of_file(state / name / "node.log")
        own = [line for line in lines if line.message_id == message_id]
        assert {line.node for line in lines} == {name}
        assert {line.run for line in own} == {str(outcome.run_id)}
        assert any("Receiving: train" in line.text for line in own)
        assert any("Sent successfully" in line.text for line in own)


@pytest.mark.slow
def test_the_command_shows_the_lines_of_a_run_or_of_one_of_its_nodes(run):
    outcome, _, _, shown = run
    assert shown[""].exit_code == 0, shown[""].output
    everything, of_node = shown[""].stdout.splitlines(), shown["node-1"].stdout.splitlines()
    assert any("server" in line and "round   1/1" in line for line in everything)
    assert {f"node-{n} supernode" for n in range(3)} <= {
        " ".join(line.split()[1:3]) for line in everything
    }
    assert all("node-1" in line for line in of_node)
    assert any("server" in line and "train, node-1: replied" in line for line in of_node)
    assert shown["ward-9"].exit_code == 1
    assert "no line is about ward-9" in shown["ward-9"].stderr
    assert str(outcome.run_id) in shown["ward-9"].stderr


@pytest.mark.slow
def test_no_secret_and_no_sample_is_in_a_log(run):
    """Of the node whose table cannot be read neither, whose error is about a cell."""
    outcome, state, wards, shown = run
    logs = [*state.rglob("*.log"), *state.parent.rglob("*.jsonl")]
    assert {file.name for file in logs} >= {"superlink.log", "node.log", "journal.jsonl"}
    text = "\n".join(file.read_text() for file in logs)
    text += "\n".join([*outcome.lines, *(result.output for result in shown.values())])
    assert "2.csv, line 42: age is no number" in text  # the error is there
    secrets = [file.read_bytes() for file in state.rglob("*secret*") if file.is_file()]
    assert len(secrets) >= 3
    ages = [row["age"] for ward in wards for row in csv.DictReader(ward.open())]
    for planted in (TOKEN, PASSWORD, PATIENT, CELL, *ages):
        assert planted not in text
    for secret in secrets:
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text


@pytest.mark.slow
def test_what_an_app_prints_is_about_its_message_and_forges_no_line(run):
    """Without a sandbox, too: the node writes the lines."""
    lines = of_file(run[1] / "node-0" / "node.log")
    raised = [line for line in lines if line.text == "ClientApp raised an exception"]
    (line,) = raised
    assert (line.level, line.process, line.node) == ("ERROR", "app", "node-0")
    of_message = [other for other in lines if other.message_id == line.message_id]
    assert any("Receiving: train" in other.text for other in of_message)
    assert [other.process for other in of_message if other.text == FORGED] == ["app"]
    assert not any(other.node == "ward-9" for other in lines)
