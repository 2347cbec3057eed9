"""`make test-wheel`: installed with all that it needs, the wheel does what the pages show."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from flwr_distill.fleet.local_federation import free_ports
from tests.docs.pages import commands
from tests.docs.reader import Reader

from .conftest import ROOT

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]

PYTHONS = os.environ.get("WHEEL_PYTHONS", "").split()
ELSEWHERE = {
    "node": "`up` starts them; tests/deploy/test_hosts_full.py between hosts",
    "edge": "tests/end_to_end/test_edges.py",
    "audit": "minutes: tests/cli/test_audit_command.py",
}
"""Subcommands of the pages' blocks that the walk does not type, and why."""
SHOWN = ("README.md", "docs/start.md", "docs/runs.md", "docs/distil.md", "docs/plugins.md")
"""Pages whose commands it does."""
ONLINE = "online. In another terminal"
LITTLE = (
    'dataset="digits" model="auto" min-nodes=2 num-rounds=1 partition.classes=5 partition.pool=0 '
    'hfldd.groups=2 hfldd.auxiliary="noise" hfldd.auxiliary-size=50 hfldd.distill-steps=2 '
    "hfldd.distilled-size=20 train.local-epochs=1"
)


class Walk(Reader):
    """Types into an empty folder, and notes which of our subcommands it typed."""

    typed: set[str]

    def type(self, text, **options):
        """Run a command, as `Reader.type` does."""
        self.typed |= set(re.findall(r"flwr-distill ([a-z]+)", text))
        return super().type(text, **options)


@pytest.fixture(params=PYTHONS)
def walk(request, wheel, tmp_path):
    """An empty folder, and the wheel with its extras in an environment of that Python."""
    environment = tmp_path / "env"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", request.param, environment], check=True)
    command = [uv, "pip", "install", "-q", "--python", environment]
    extras = f"{wheel}[simulation,partitions,backbones]"
    subprocess.run([*command, "-c", ROOT / "requirements.lock", extras], check=True)
    folder = tmp_path / "walk"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    subprocess.run([*command, "--no-deps", folder / "examples" / "class-anchors"], check=True)
    walking = Walk(folder, FLWR_HOME=str(folder / "flower"))
    walking.typed = set()
    walking.env["PATH"] = f"{environment / 'bin'}:{walking.env['PATH']}"
    walking.env.pop("PYTHONPATH", None)
    yield walking
    walking.close()
    shutil.rmtree(environment)


def test_the_wheel_does_what_the_pages_show(walk):
    assert "flwr-distill 0" in walk.type("flwr-distill --version")
    assert "software" in walk.type("flwr-distill doctor --json || true")
    try_it(walk)
    run_a_federation(walk)
    choose(walk)
    own_data(walk)
    simulate(walk)
    without_a_federation(walk)
    shown = {
        match[1]
        for page in SHOWN
        for command in commands(ROOT / page)
        if command.fenced and (match := re.match(r"flwr-distill (\w+)", command.text))
    }
    assert shown - ELSEWHERE.keys() <= walk.typed


def try_it(walk):
    walk.type("flwr-distill demo --nodes 2 --rounds 1 --classes 5")
    first, second = sorted(file.parent.name for file in walk.folder.glob("runs/*/report.html"))
    assert first[:6] in walk.type("flwr-distill runs list")
    walk.type(f"flwr-distill report {first} {second}")
    walk.type(f"flwr-distill runs export {second} --format onnx --output model")
    digits = load_digits()
    for number in range(200):
        site = walk.folder / f"ward-{number % 2}" / str(digits.target[number])
        site.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).save(site / f"{number}.png")
    assert "%" in walk.type("flwr-distill predict model/model.onnx ward-0/0/0.png")


def run_a_federation(walk):
    walk.type("flwr-distill up --nodes 2", until=ONLINE)
    settings = 'strategy="fedprox" train.proximal-mu=0.1 partition.scheme="dirichlet" num-rounds=1'
    assert "Results in" in walk.type(f"flwr-distill run -c '{settings}'")
    assert "online" in walk.type("flwr-distill status")


def choose(walk):
    """Take a preset, and the method of an installed package."""
    walk.type("flwr-distill settings hfldd")
    walk.type("flwr-distill partition cluster-mc --nodes 20 --plot clusters.png")
    walk.type(f"flwr-distill run --preset hfldd-mnist -c '{LITTLE}'")
    anchors = "strategy='class-anchors' class-anchors.weight=1.0 num-rounds=1"
    walk.type(f'flwr-distill run -c "{anchors}"')
    walk.type("flwr-distill stop")


def own_data(walk):
    """Train the pages' own model with their own strategy on folders of pictures."""
    assert "100" in walk.type("flwr-distill data check ward-0")
    page = (ROOT / "docs" / "plugins.md").read_text()
    for content, name in re.findall(r"```python\n(# (my_pkg/\w+\.py),.*?)```", page, re.S):
        (walk.folder / name).parent.mkdir(exist_ok=True)
        (walk.folder / name).write_text(content)
    walk.env["PYTHONPATH"] = str(walk.folder)
    walk.type("flwr-distill up --data ward-0 --data ward-1", until=ONLINE)
    task = 'dataset="private" private.shape="1x8x8" private.num-classes=10 fraction-evaluate=1.0'
    own = 'num-rounds=1 model="my_pkg.nets:TinyNet" strategy="my_pkg.strategies:Decay"'
    walk.type(f"flwr-distill run -c '{task} {own}'")
    walk.type("flwr-distill stop")
    del walk.env["PYTHONPATH"]


def simulate(walk):
    """As docs/start.md does, but on a SuperLink that ends with the test."""
    control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(2))
    home = walk.folder / "flower"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "sim"\n\n[superlink.sim]\naddress = "{control}"\ninsecure = true\n'
    )
    walk.type("export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 GRPC_ENABLE_FORK_SUPPORT=0")
    addresses = f"--control-api-address {control} --serverappio-api-address {serverappio}"
    superlink = f"flower-superlink --insecure --simulation {addresses}"
    walk.type(superlink, until="Starting Control API")
    settings = "min-nodes=3 partition.classes=4 num-rounds=1"
    nodes = "num-supernodes=3 client-resources-num-cpus=1"
    output = walk.type(
        f'flwr run "$(flwr-distill app)" sim --stream --federation-config "{nodes}" -c "{settings}"'
    )
    assert "Results in" in output


def without_a_federation(walk):
    walk.type("flwr-distill distill ward-0 --method dm --per-class 2 --steps 5")
