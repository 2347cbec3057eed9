"""A new user's first hour: what is typed wrongly is said in one line, and what fails, fails."""

import os
import sys
import traceback
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from PIL import Image
from sklearn.datasets import load_digits

import flwr_distill.cli.run
from benchmarks.in_process import InProcessGrid, only_errors
from flwr_distill.fleet.submission import RunOutcome
from flwr_distill.server.app import main

from .cli.commands import assert_refused, command
from .docs.reader import Reader

ROOT = Path(__file__).resolve().parents[1]
BAD_SETTINGS = [
    # (run config, what the line names: setting and value, and the remedy)
    ("train.lrr=0.1", "train.lrr", "did you mean train.lr"),
    ("trian.lr=0.1", "trian", "did you mean train"),
    ("num-round=3", "num-round", "did you mean num-rounds"),
    ("train.lr=-1", "train.lr = -1", "greater than 0"),
    ('train.lr="fast"', "train.lr = 'fast'", "valid number"),
    ('train.optimizer="sdg"', "train.optimizer = 'sdg'", "'sgd'"),
    ("num-rounds=0", "num-rounds = 0", "must be >= 1"),
    ('links="pigeon"', "links = 'pigeon'", "'direct'"),
    ('strategy="hflddd"', "strategy = 'hflddd'", "hfldd"),
    ('strategy="nosuch_pkg:Method"', "nosuch_pkg:Method", "install"),
    ('strategy="collections:OrderedDict"', "collections:OrderedDict", "Strategy"),
    ("strategy-args='{'", "strategy-args", "JSON"),
    ('strategy="moon" strategy-args=\'{"mu": -1}\'', "mu = -1", "greater than"),
    ('strategy="fedavg" strategy-args=\'{"nosuch": 1}\'', "nosuch", "strategy-args"),
    ('aggregator="mean"', "aggregator = 'mean'", "krum"),
    ('aggregator="collections:OrderedDict"', "collections:OrderedDict", "Strategy"),
    ('strategy="cadis" aggregator="krum"', "aggregator = 'krum'", "set aggregator"),
    ('dataset="mnits"', "mnits", "mnist"),
    ('dataset="mnist" data-root="nowhere"', "nowhere", "download"),
    ('model="resnet99"', "resnet99", "resnet"),
    ('model="hfldd-mnist"', "hfldd-mnist", "digits-cnn"),
    ('model="nosuch_pkg:Net"', "nosuch_pkg", "install"),
    ('partition.scheme="random"', "partition.scheme = 'random'", "'pathological'"),
    ("partition.classes=11", "partition.classes", "10"),
    ('partition.scheme="dirichlet" partition.alpha=0.0', "partition.alpha = 0.0", "greater than 0"),
    ('partition.scheme="index-file"', "partition.index-file", "file"),
    (
        'partition.scheme="cluster-mc" partition.clusters="a:b"',
        "partition.clusters = 'a:b'",
        "must be sizes",
    ),
    ('private.shape="2x8x8"', "private.shape = '2x8x8'", "must be channels"),
    ('strategy="cadis" train.feature-layer="nosuch"', "train.feature-layer", "nosuch"),
    ('hfldd.distiller="kpi"', "hfldd.distiller = 'kpi'", "kip"),
    ('hfldd.start="somewhere"', "hfldd.start = 'somewhere'", "noise"),
    ('hfldd.auxiliary="nosuch"', "hfldd.auxiliary", "nosuch"),
    ('strategy="fedhead-plus" fedhead.reference="nosuch"', "fedhead.reference", "nosuch"),
    ('strategy="fednova" train.momentum=0.9', "train.momentum = 0.9", "FedNova"),
    ('strategy="fedhead" train.dp-noise=1.0', "train.dp-noise", "fedhead"),
    ('server-device="cuda:9"', "server-device", "cpu"),
    ('resume="nosuch"', "resume", "nosuch"),
    ("num-rounds", "num-rounds", "key=value"),
]

BAD_RUNS = [
    ('private.classes="zero,one,two,three"', "four", "private.classes"),
    ('model="nosuch"', "nosuch", "digits-cnn"),
    ('strategy="broken"', "broken", "line 1"),
    ('hfldd.distiller="kpi"', "hfldd.distiller", "kip"),
    ("min-nodes=4 phase-timeout=2.0", "min-nodes = 4", "start more nodes"),
]
"""The same for what only nodes or the server can know: added to `OWN`."""

NAMES = ["zero", "one", "two", "three", "four"]
OWN = """
dataset = "private"
strategy = "hfldd"
num-rounds = 1
fraction-evaluate = 1.0

[private]
shape = "1x8x8"
classes = "zero,one,two,three,four"

[train]
local-epochs = 1

[hfldd]
distill-steps = 2

[fedhead]
distill-epochs = 1

[fedlgd]
first-steps = 2
refine-steps = 2
global-steps = 2
"""
PLUG_IN = {
    "loud.py": """
from flwr_distill.protocol.method import Method, all_protected
from flwr_distill.strategies.common.checked import CheckedFedAvg


class Loud(CheckedFedAvg):
    pass


METHOD = Method("loud", "loud:Loud", unprotected=all_protected)
""",
    "broken_plug_in.py": "raise OSError('no licence')",
    "plug_ins-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: plug_ins\nVersion: 1.0\n",
    "plug_ins-1.0.dist-info/entry_points.txt": """
[flwr_distill.methods]
loud = loud:METHOD
broken = broken_plug_in:METHOD
""",
}


@pytest.fixture
def without_nodes(monkeypatch, tmp_path):
    """Runs end at the ServerApp, which is here and has no nodes."""

    def submit(app_dir, overrides, *, control, on_line):
        run_config = {"runs-dir": str(tmp_path / "runs"), "phase-timeout": 0.1, **overrides}
        try:
            with only_errors():
                main(InProcessGrid({}), Context(7, 1, {}, RecordDict(), run_config))
        except Exception as error:
            lines = [
                "ERROR :     ServerApp raised an exception",
                *traceback.format_exc().split("\n"),
            ]
            for line in lines:
                on_line(line)
            details = f"ServerApp failed with exception: {error}"
            return RunOutcome(7, "finished:failed", lines, details)
        raise AssertionError("a run without nodes came to its end")

    monkeypatch.setattr(flwr_distill.cli.run, "submit", submit)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("config", "named", "remedy"), BAD_SETTINGS, ids=[bad[0] for bad in BAD_SETTINGS]
)
def test_a_bad_setting_ends_the_command_with_one_line(config, named, remedy, without_nodes):
    assert_refused(
        command("run", "--superlink", "localhost:1", "--insecure", "-c", config),
        "flwr-distill run: ",
        named,
        remedy,
    )


@pytest.fixture
def wards(tmp_path):
    """Three folders of digits in class folders with names; a file of the first is no image."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        if digit < len(NAMES) and number < 600:
            file = tmp_path / "abc"[number % 3] / NAMES[digit] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file)
    (tmp_path / "a" / NAMES[0] / "broken.png").write_bytes(b"no image")
    return tmp_path


@pytest.fixture
def reader(wards):
    """Types into the folder of the wards; its folder `site` is on the path of all processes."""
    path = os.pathsep.join(
        filter(None, [str(wards / "site"), str(ROOT), os.environ.get("PYTHONPATH")])
    )
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    (wards / "site").mkdir()
    typing = Reader(wards, PATH=commands, PYTHONPATH=path)
    yield typing
    typing.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_hour(reader, wards):
    (wards / "own.toml").write_text(OWN)
    assert "broken.png" in reader.type("flwr-distill data check a")
    reader.type("flwr-distill data check --strict a", fails=True)
    reader.type("flwr-distill up --data a --data b --data c", until="online. In another terminal")

    def run(config, **more):
        return reader.type(f"flwr-distill run -c own.toml -c '{config}'", **more)

    for strategy in ("fedavg", "hfldd", "fedhead", "cadis", "fedlgd"):
        output = run(f'strategy="{strategy}"')
        assert "round   1/1" in output, output
        assert f"│ {strategy} " in output, output

    for name, content in PLUG_IN.items():
        (wards / "site" / name).parent.mkdir(exist_ok=True)
        (wards / "site" / name).write_text(content)
    assert "round   1/1" in run('strategy="loud"')

    for config, named, remedy in BAD_RUNS:
        *_, last = run(config, fails=True).splitlines()
        assert last.startswith("flwr-distill run: "), last
        assert named in last
        assert remedy in last
    reader.type("flwr-distill stop")
