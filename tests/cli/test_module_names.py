"""The files of other Flower projects on Python's path: they have names of our packages."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fleet.checkup
from fleet.checkup import checkup
from node.own_modules import PACKAGES, ROOT, own_first, own_first_in
from node.processes import start_bound
from node.settings import NodeSettings
from task.plugin import PluginError, import_object

COMMAND = str(Path(sys.executable).parent / "flwr-distill")


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    """The folder of a Flower project whose modules do nothing but fail."""
    folder = tmp_path / "quickstart"
    folder.mkdir()
    for name in ("task", "client_app", "server_app", "client", "server", "node"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the quickstart')\n")
    (folder / "anchors.py").write_text("from flwr.serverapp.strategy import FedAvg as Anchors\n")
    return folder


def run(quickstart: Path, python_path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = python_path.replace("FOLDER", str(quickstart))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [COMMAND, *arguments], env=env, cwd=quickstart, capture_output=True, text=True, timeout=120
    )


ON_PATH = pytest.mark.parametrize("python_path", ["FOLDER", ".", ":/nowhere", "/nowhere:FOLDER"])


@ON_PATH
def test_the_command_starts_beside_a_flower_projects_files(
    quickstart: Path, python_path: str
) -> None:
    done = run(quickstart, python_path, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flwr-distill ")


@pytest.mark.slow
def test_settings_and_doctor_work_beside_them_and_doctor_names_them(quickstart: Path) -> None:
    settings = run(quickstart, "FOLDER", "settings", "fedavg")
    assert settings.returncode == 0, settings.stderr
    doctor = run(quickstart, "FOLDER", "doctor")
    (line,) = [line for line in doctor.stdout.splitlines() if str(quickstart) in line]
    assert line.startswith("ok")
    assert all(name in line for name in ("task", "client", "server", "node"))


@ON_PATH
def test_processes_that_we_start_import_our_packages_and_the_others_modules(
    quickstart: Path, python_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quickstart)
    path = python_path.replace("FOLDER", str(quickstart))
    code = "import node.main, task.plugin, anchors; print(node.__file__)"
    env = {**os.environ, "PYTHONPATH": path}
    log = quickstart / "log"
    command = [sys.executable, "-P", "-c", code]
    assert start_bound(command, log=log, env=env, cwd=quickstart.parent).wait(60) == 0
    assert log.read_text().splitlines()[-1] == str(Path(ROOT) / "node" / "__init__.py")


def test_only_folders_with_modules_of_our_names_are_put_behind_ours(
    quickstart: Path, tmp_path: Path
) -> None:
    (tmp_path / "task").mkdir()  # no package: never imported where there is one
    plain = str(tmp_path)
    assert own_first([plain, "/nowhere"]) == [plain, "/nowhere"]
    assert own_first([plain, str(quickstart), "x"]) == [plain, ROOT, str(quickstart), "x"]
    assert own_first([plain, ROOT, str(quickstart)]) == [plain, ROOT, str(quickstart)]
    once = own_first_in(str(quickstart))
    assert own_first_in(once) == once == os.pathsep.join([ROOT, str(quickstart)])


def test_the_packages_are_those_that_are_installed() -> None:
    settings = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())
    assert set(PACKAGES) == set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_a_plug_in_that_needs_a_module_with_a_name_of_ours_is_refused_with_the_file_of_ours(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quickstart / "uses_task.py").write_text("from task import Net\n")
    monkeypatch.syspath_prepend(str(quickstart))
    for named, module in {"uses_task:Net": "task", "client:Net": "client"}.items():
        with pytest.raises(PluginError, match=f"{ROOT}/{module}/__init__.py"):
            import_object(named)


def test_doctor_fails_where_another_package_has_a_name_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "nodes-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: nodes\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("node\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [f for f in checkup(NodeSettings()) if f.check == "modules"]
    assert found.state == "failed"
    assert "nodes" in found.found


def test_modules_of_our_names_beside_ours_are_no_failure_and_come_without_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.checkup, "namesakes", lambda: {str(tmp_path): ["task"]})
    (found,) = [f for f in checkup(NodeSettings()) if f.check == "modules"]
    assert (found.state, found.remedy) == ("ok", "")
    assert str(tmp_path) in found.found
