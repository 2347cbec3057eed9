"""The app as it is published, and a federation of the installed Flower's own processes."""

import shutil
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.flower_federation import FlowerFederation
from flwr_distill.base.text import counted

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def app(tmp_path_factory):
    """Our app as it is published: its packages and settings, without what is installed here."""
    folder = tmp_path_factory.mktemp("stock") / "flwr-distill"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for room in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Start three nodes, of which the first is ours."""
    federation = FlowerFederation(3, tmp_path_factory.mktemp("federation"), ours=1)
    print(f"flwr {version('flwr')}: {counted(3, 'node')}, log {federation.log}")
    with federation:
        yield federation
