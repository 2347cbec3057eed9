"""Packages that are installed for a test, beside ours, and gone after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.server.app import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "class-anchors"


@pytest.fixture(scope="session")
def example_site(tmp_path_factory):
    """Folder into which the example is installed, as pip installs it."""
    site = tmp_path_factory.mktemp("site")
    commands = Path(sys.executable).parent
    subprocess.run(
        [
            *("uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable),
            *("--target", str(site), str(EXAMPLE)),
        ],
        check=True,
        env={**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
    )
    return site


@pytest.fixture
def example(example_site, on_path):
    """The example, installed."""
    return on_path(example_site)


@pytest.fixture
def run(client_grid, tmp_path):
    """Run our ServerApp on nodes in this process; returns the run's folder and the grid."""

    def start(num_nodes=3, run_id=7, broken=lambda node, message: False, **settings):
        overrides = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        arguments = overrides.get("strategy-args")
        if isinstance(arguments, dict):
            overrides["strategy-args"] = json.dumps(arguments)
        config = {
            "num-rounds": 2,
            "train.local-epochs": 1,
            "min-nodes": num_nodes,
            "runs-dir": str(tmp_path / "runs"),
            "phase-timeout": 20.0,
            **overrides,
        }
        grid = client_grid(num_nodes, config, broken)
        start.grid = grid
        main(grid, Context(run_id, 1, {}, RecordDict(), config))
        return tmp_path / "runs" / (str(run_id) if "resume" not in config else config["resume"])

    return start


@pytest.fixture
def sent(run):
    """Give the messages of a type that the server sent in the last run."""
    return lambda kind: [m for m in run.grid.pushed if m.metadata.message_type == kind]


@pytest.fixture
def rows():
    """Read what a run says of its rounds."""

    def read(folder):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
