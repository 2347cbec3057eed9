"""The batch script of examples/slurm starts a node for each task, with stand-ins for Slurm.

There is no Slurm here: `srun` is a loop, and `flwr-distill` writes down how it was called.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import typer

from flwr_distill.cli.main import app
from flwr_distill.node.settings import load_settings

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "nodes.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$CALLS/srun"; shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task CUDA_VISIBLE_DEVICES=$task SLURM_CPUS_PER_TASK=8 "$@" &
done
wait
"""
NODE = """#!/usr/bin/env python3
import json, os, sys
file = os.path.join(os.environ["CALLS"], os.environ["SLURM_PROCID"])
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
open(file, "w").write(json.dumps(told))
"""


@pytest.fixture
def slurm(tmp_path):
    """Run the script as Slurm does, with so many tasks; return how it ended."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    for folder in (programs, calls):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("flwr-distill", NODE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    env = {**os.environ, "CALLS": str(calls), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(tasks, **more):
        return subprocess.run(
            ["bash", str(SCRIPT)],
            env={**env, "SLURM_NTASKS": str(tasks), **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def nodes_in(folder, count):
    for task in range(count):
        each = folder / str(task)
        each.mkdir(parents=True)
        (each / "node.yaml").write_text(f"name: gpu-{task}\nsuperlink: fl.example.org:9092\n")
        for name in ("ca.crt", "login.key"):
            (each / name).touch()
    return str(folder)


def test_each_task_runs_the_node_of_its_number_on_its_gpu(slurm, tmp_path, monkeypatch):
    done = slurm(3, NODES=nodes_in(tmp_path / "nodes", 3))
    assert done.returncode == 0, done.stderr
    node = typer.main.get_command(app).commands["node"]
    for task in range(3):
        given = json.loads((tmp_path / "calls" / str(task)).read_text())
        assert (given["cwd"], given["gpu"]) == (str(tmp_path / "nodes" / str(task)), str(task))
        monkeypatch.chdir(given["cwd"])
        command, *arguments = given["argv"]
        assert command == "node"
        context = node.make_context("node", arguments)
        options = {k: v for k, v in context.params.items() if k not in ("config", "node_config")}
        settings = load_settings(Path(context.params["config"]), options)
        assert (settings.name, settings.device, settings.threads) == (f"gpu-{task}", "cuda", 8)
        assert settings.superlink == "fl.example.org:9092"
        assert settings.state_dir == tmp_path / "nodes" / str(task) / "state"
        assert settings.auth_key == tmp_path / "nodes" / str(task) / "login.key"
    assert "--kill-on-bad-exit=0" in (tmp_path / "calls" / "srun").read_text().split()


def test_a_folder_that_is_missing_is_named_before_any_node_starts(slurm, tmp_path):
    folder = nodes_in(tmp_path / "nodes", 2)
    done = slurm(3, NODES=folder)
    assert done.returncode == 2
    assert done.stderr == f"NODES={folder}: there is no 2/node.yaml\n"
    assert list((tmp_path / "calls").iterdir()) == []


def test_without_a_folder_it_says_what_to_give(slurm):
    done = slurm(1)
    assert done.returncode != 0
    assert "sbatch --export=ALL,NODES=FOLDER" in done.stderr
