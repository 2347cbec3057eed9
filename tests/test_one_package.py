"""One package: whatever is installed beside it or lies on Python's path."""

import os
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from flwr_distill import ROOMS
from flwr_distill.flower.bundle import app_bundle

ROOT = Path(__file__).resolve().parents[1]
COMMAND = str(Path(sys.executable).parent / "flwr-distill")


@pytest.fixture
def quickstart(tmp_path):
    """The folder of a Flower project, with modules that have the names of our folders."""
    folder = tmp_path / "quickstart"
    folder.mkdir()
    for name in ROOMS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the quickstart')\n")
    return folder


@pytest.mark.skipif(not Path(COMMAND).exists(), reason="our command is not installed")
def test_a_flower_projects_files_on_the_path_have_names_of_their_own(quickstart):
    env = {**os.environ, "PYTHONPATH": str(quickstart)}
    done = subprocess.run(
        [COMMAND, "--version"], env=env, cwd=quickstart, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flwr-distill ")


def test_no_module_is_loaded_under_two_names():
    """Of server, nodes and command, in a process that has the checkout on its path too."""
    code = (
        "import sys, flwr_distill.cli.main, flwr_distill.client.app, flwr_distill.server.app;"
        "from flwr_distill.protocol.registry import built_in_methods, handlers;"
        "from flwr_distill.task.plugin import import_object;"
        "[import_object(path) for path in handlers().values()];"
        "[import_object(m.strategy) for m in built_in_methods().values() if m.strategy];"
        "print(*(f'{m.__file__}={n}' for n, m in [*sys.modules.items()]"
        " if n != '__main__' and getattr(m, '__file__', None)), sep='\\n')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    loaded = [line.split("=") for line in done.stdout.splitlines() if line.startswith(str(ROOT))]
    ours = [(file, name) for file, name in loaded if Path(file).parts[len(ROOT.parts)] in ROOMS]
    assert len(ours) > 100
    assert {name for _, name in ours if not name.startswith("flwr_distill.")} == set()
    assert len({os.path.realpath(file) for file, _ in ours}) == len(ours)


def test_wheel_and_type_checker_have_the_folders_of_the_package():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    assert wheel["sources"] == {room: f"flwr_distill/{room}" for room in ROOMS}
    assert set(wheel["only-include"]) == {"flwr_distill", *ROOMS}
    links = {link.name: link.resolve() for link in (ROOT / "typings" / "flwr_distill").iterdir()}
    assert {room: ROOT / room for room in ROOMS}.items() <= links.items()


def test_a_thread_finds_the_client_app_while_another_one_imports_the_package(tmp_path):
    """As in Flower's simulation runtime, of an app that was just unpacked."""
    with zipfile.ZipFile(BytesIO(app_bundle(ROOT))) as bundle:
        bundle.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from importlib import import_module; from importlib.util import find_spec;"
        "from threading import Thread; Thread(target=import_module, args=['flwr_distill']).start();"
        "print(find_spec('flwr_distill.client_app').origin)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith(str(tmp_path))
