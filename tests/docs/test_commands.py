"""Every command of README and docs is run as it stands there, or named here with the reason.

A run of a federation is trained here in one process, for one round, with a round's worth of steps;
`test_in_order.py` runs the pages' sequences with real processes.
"""

import argparse
import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import click
import numpy as np
import pytest
import typer
from flwr.cli.app import app as flwr_app
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.in_process import run_in_process
from flwr_distill.cli.judge import JUDGES, QUICK
from flwr_distill.cli.main import app
from flwr_distill.distill.own_network import own_network
from flwr_distill.fleet.run_config import read_run_config
from flwr_distill.flower.own_app import PRESETS
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec

from .pages import PAGES, ROOT, commands, files
from .test_in_order import IN_ORDER

TREE = "docker compose needs an engine: tests/deploy/test_compose.py runs compose.yaml"
HOSTS = "needs other machines: tests/deploy/test_hosts_full.py does it between namespaces"

NOT_HERE = {
    r"docker |.*\bdocker (compose|save|load)": TREE,
    r"(ssh|scp) ": "needs another machine",
    r"flwr-distill superlink\b": HOSTS,
    r"(kubectl|helm) |head .* > secret": "needs a cluster: tests/deploy/test_chart.py",
    r"sbatch ": "needs Slurm: tests/deploy/test_slurm.py",
    r"flwr-distill (node|register|edge)\b": HOSTS,
    r"flwr-distill (dashboard|up --dashboard)\b|openssl ": "tests/dashboard",
    r"flwr-distill (queue|run --queue)\b": "needs a queue: tests/deploy/test_queue_service.py",
    r"flwr-distill stop RUN": "needs a run: tests/cli/test_federation_commands.py",
    r"flwr-distill evaluate ": "needs a federation: tests/end_to_end/test_real_federation.py",
    r"flwr-distill stats( |$)": "needs a federation: tests/end_to_end/test_statistics.py",
    r"flwr-distill runs forget ": "of a run of analytic: tests/strategies/test_analytic.py",
    r"flwr-distill runs export .*--student": "tests/cli/test_runs_command.py",
    r"flwr-distill certs (sign|renew|revoke) ": "see tests/cli/test_certs_command.py",
    r"flwr-distill (doctor|up) .*--device cuda": "needs a GPU: tests/gpu",
    r"flwr-distill (up .*--log-format|logs) ": "real nodes: tests/end_to_end/test_json_logs.py",
    r"flwr-distill up --data": "three real nodes, as docs/tutorial.md has them",
    r"flwr-distill run -c .*dinov2": "needs its weights: tests/task/test_pretrained.py",
    r"flwr-distill distill digits": "half a minute: tests/cli/test_distill_command.py",
    r"flwr-distill audit ": "minutes: tests/cli/test_audit_command.py",
    r"flwr-distill doctor .*--superlink": "needs another machine: tests/cli/test_doctor_network.py",
    r"flwr-distill (demo|status|up)$": "run in order, or with the options given there",
    r"flwr new$": "Flower's, and it downloads",
    r"flwr run (\.|\"\$\(flwr-distill app\)\")$": "needs a SuperLink in Flower's own configuration",
    r"flwr run \./examples/own-app my-federation": "tests/end_to_end/test_own_app.py",
    r"flwr run (\.|\"\$\(flwr-distill app\)\") local": "tests/end_to_end/test_simulation.py",
    r"python -m flwr_distill.flower.names": "tests/flower/test_names.py",
    r"ray start ": "needs other machines: tests/end_to_end/test_simulation.py",
    r"(\w+=\S+ )*make (demo .+|test.*)": "minutes, or what runs this test",
    r"make PYTHON=": "installs everything anew: .ci/run does",
    r"flwr-distill demo --strategy fedhead": "minutes: tests/end_to_end",
    r"(export|source) ": "for the commands that follow",
    r"make proto": "rewrites the sources that are in git: tests/links/test_proto.py",
    r"tensorboard ": "another project's server; tests/server/record/test_report.py reads its files",
    r"pip install": "changes the environment: tests/plugins/conftest.py installs the same folder",
    r"(mkdir|mv|cp) ": "of the reader's own folders",
}
"""Patterns of commands that are not run, and why; their options are checked all the same."""

PLACEHOLDERS = {
    r"\bFILE\b": "file.png",
    r"\bDIR\b": "data",
    r"\bRUN\b": "latest",
    r"\bIMAGE\b": "own/0/0.png",
    r"/data/ward-\d": "own",
}
LITTLE = {
    "num-rounds": 1,
    "train.local-epochs": 1,
    "resume": "",
    "hfldd.auxiliary-size": 20,
    "hfldd.distill-steps": 2,
    "hfldd.distilled-size": 4,
    "hfldd.groups": 2,
    "hfldd.initial-steps": 2,
    "private.shape": "3x16x16",
}
NODES, PARTS = 3, 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: a fresh clone's, with a run and files that pages take for granted."""
    run = tmp_path / "runs" / "101"
    shutil.copytree(ROOT / "tests" / "golden" / "runs" / "hfldd", run)
    model = create_model("auto", data_spec(TaskSettings()), seed=0)
    save_file(model.state_dict(), run / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    for name in (
        "ca.crt",
        "node.crt",
        "node.csr",
        "node.key",
        "login.key",
        "node.yaml",
        "user.crt",
        "user.key",
    ):
        (tmp_path / name).touch()
    (tmp_path / "policy.yaml").write_text(files(ROOT / "docs" / "policy.md")["policy.yaml"])
    for state in ("state/node", "runs/nodes/node-0"):
        (tmp_path / state).mkdir(parents=True)
    (tmp_path / "train.csv").write_text("height,weight,label\n1.7,70,a\n1.8,80,b\n")
    (tmp_path / "table.csv").write_text("age,ill\n61,no\n47,yes\n")
    stated = '[private]\nlabel = "ill"\nclasses = "no,yes"\ncolumns = "age"\n'
    (tmp_path / "tables.toml").write_text(stated)
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for part, count in (("train", 60), ("test", 20)):
            images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = np.arange(count) % 10
            np.savez(tmp_path / "data" / name / f"{part}.npz", images=images, labels=labels)
    for number in range(40):
        own = tmp_path / "own" / str(number % 4) / f"{number}.png"
        own.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(own)
    return tmp_path


@pytest.fixture
def example(install, on_path):
    """The example, as if it were installed."""
    on_path(ROOT / "examples" / "class-anchors")
    install("nothing", "", name="class_anchors", class_anchors="class_anchors.method:METHOD")


@pytest.fixture
def encoder(folder, on_path):
    """The network of docs/plugins.md, and a file with its weights."""
    module = folder / "my_pkg" / "nets.py"
    module.parent.mkdir()
    module.write_text(files(ROOT / "docs" / "plugins.md")["my_pkg/nets.py"])
    on_path(folder)
    weights = own_network("my_pkg.nets:Encoder").module.state_dict()
    save_file(weights, folder / "encoder.safetensors")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_run_or_named(page, folder, example, encoder):
    for command in {command.text: command for command in commands(page)}.values():
        if command.text in IN_ORDER.get(command.page, ()):
            continue
        reason = next((r for p, r in NOT_HERE.items() if re.match(p, command.text)), None)
        action = next((a for p, a in ACTIONS.items() if re.match(p, command.text)), None)
        try:
            if is_whole(command) and reason is None:
                assert action, "neither run nor named: add it to ACTIONS, NOT_HERE or IN_ORDER"
                action(command, folder)
        except Exception as error:
            raise AssertionError(f"{command}: {error!r}") from error


def test_every_reason_is_still_needed():
    texts = [command.text for page in PAGES for command in commands(page)]
    unused = [p for p in {**NOT_HERE, **ACTIONS} if not any(re.match(p, text) for text in texts)]
    assert unused == []
    for page, in_order in IN_ORDER.items():
        assert set(in_order) <= {c.text for c in commands(ROOT / page)}, page


def is_whole(command):
    """Parse the arguments of this project's or Flower's command; False if one is still to come.

    A text may name a command or an option without what it takes, a block of commands may not.
    """
    program, *words = filled(command)
    tree = {"flwr-distill": app, "flwr": flwr_app}.get(program)
    parsed = typer.main.get_command(tree) if tree else None
    while isinstance(parsed, click.Group) and words:
        name, *words = words
        parsed = parsed.commands[name]
    if isinstance(parsed, click.Group):
        return False
    try:
        if parsed:
            parsed.make_context(program, words)
    except click.exceptions.Exit:
        return False  # --help
    except (click.MissingParameter, click.BadOptionUsage):
        if command.fenced:
            raise
        return False
    return True


def invoke(command, folder):
    """Run a command of ours to its end, in this process."""
    _, *arguments = filled(command)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def distil(command, folder):
    """Distil as a command asks, in two steps, and judge in two."""
    _, *arguments = filled(command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(JUDGES, "quick", (replace(QUICK, steps=2),))
        result = CliRunner().invoke(app, [*arguments, "--steps", "2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def train(command, folder):
    """Train a round of the run that a command starts, with its settings, on three nodes."""
    words = command.argv
    config = {}
    for option, value in itertools.pairwise(words):
        if option == "--preset":
            config |= read_run_config(str(PRESETS / f"{value}.toml"))
        if option == "-c":
            config |= read_run_config(value.removesuffix(" ..."))
    config |= {**LITTLE, "data-root": str(folder / "data")}
    if "backbone.size" in config:
        config["backbone.size"] = 32
    private = {"data": str(folder / "own")} if config.get("dataset") == "private" else {}
    (*rows,) = run_in_process(config, [{"num-partitions": PARTS, **private}] * NODES)
    assert rows[-1]["round"] == 1


def parse_benchmark(command, folder):
    """Read a benchmark's arguments; measuring takes minutes."""
    _, _, module, *arguments = filled(command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments])
        parse = argparse.ArgumentParser.parse_args

        def stop(parser, *given):
            parse(parser, *given)
            raise ArgumentsRead

        def stop_typer(main):
            single = typer.Typer()
            single.command()(main)
            typer.main.get_command(single).make_context(module, arguments)
            raise ArgumentsRead

        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(typer, "run", stop_typer)
        with pytest.raises(ArgumentsRead):
            runpy.run_module(module, run_name="__main__")


class ArgumentsRead(Exception):  # noqa: N818
    """A benchmark's arguments are sound."""


def plan(command, folder):
    """Ask make what it would do."""
    done = subprocess.run(
        ["make", "--dry-run", *command.argv[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


ACTIONS = {
    r"flwr-distill (run|simulate)\b": train,
    r"flwr-distill distill\b": distil,
    r"flwr-distill (certs|data|doctor|partition|predict|report|runs|settings)\b": invoke,
    r"flwr-distill (outbox|policy)\b": invoke,
    r"(\w+=\S+ )*python -m benchmarks\.": parse_benchmark,
    r"(\w+=\S+ )*make ": plan,
}
"""What runs a command, by pattern."""


def filled(command):
    """Its words, with a value for each placeholder."""
    text = " ".join(map(shlex.quote, command.argv))
    for name, value in PLACEHOLDERS.items():
        text = re.sub(name, value, text)
    return shlex.split(text)
