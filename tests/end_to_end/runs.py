"""Runs of these tests, and the files that they leave."""

import json
from pathlib import Path

from typer.testing import CliRunner

from flwr_distill.cli.main import app

ROOT = Path(__file__).resolve().parents[2]


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").open()]


def phases(folder, name):
    """Entries of the journal about a phase."""
    return [entry for entry in journal(folder) if entry.get("phase") == name]


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def with_dots(settings):
    """Settings by key, from arguments such as ``train__lr=0.1``."""
    return {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}


def submit(federation, runs, config, app=ROOT):
    """The outcome and the folder of a run on real processes."""
    shared = {"min-nodes": len(federation.nodes), "phase-timeout": 120.0, "runs-dir": str(runs)}
    outcome = federation.run(app, shared | config, timeout=240)
    return outcome, runs / str(outcome.run_id)


def complete(federation, runs, config, app=ROOT):
    """The folder of a run on real processes that completes."""
    outcome, folder = submit(federation, runs, config, app)
    assert outcome.completed, "\n".join(outcome.lines[-40:])
    return folder


def command(*arguments):
    """The output of our command, which succeeds."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def export(folder, form="safetensors"):
    """The exported model of a run, and its card."""
    command("runs", "export", folder, "--format", form)
    (file,) = (folder / "export").glob("model.*")
    (card,) = (folder / "export").glob("*.md")
    return file, card.read_text()


def watched(watch):
    """Wrap nodes of a run in this process: `watch` gets the place, the message and the reply."""

    def wrap(place, node):
        def answer(message):
            content = node(message)
            watch(place, message, content)
            return content

        return answer

    return wrap
