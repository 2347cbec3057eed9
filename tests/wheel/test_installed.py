"""The wheel, installed where no checkout is: it starts runs, and finds its settings and presets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reader import Reader
from tests.environments import shared_environment

BUNDLE = """
import json, sys, zipfile
from io import BytesIO
from flwr_distill import task
from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.own_app import APP_DIR
files = zipfile.ZipFile(BytesIO(app_bundle(APP_DIR))).namelist()
print(json.dumps([task.__file__, sys.path, sorted({name.partition("/")[0] for name in files})]))
"""


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """Types commands in an empty folder; the wheel is all that is installed of ours."""
    folder = tmp_path_factory.mktemp("site")
    environment = folder / "env"
    shared_environment(environment, editable=False)
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "-q", "--offline", "--no-deps", "--compile-bytecode"]
    subprocess.run([*command, "--python", environment, wheel], check=True)
    reader = Reader(folder)
    reader.env["PATH"] = f"{environment / 'bin'}:{reader.env['PATH']}"
    reader.env.pop("PYTHONPATH", None)
    yield reader
    reader.close()


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_outside_of_a_checkout(site):
    site.type("flwr-distill demo --nodes 2 --rounds 1 --classes 5", timeout=120)
    results = json.loads((site.folder / "runs" / "demo.json").read_text())
    assert {name: result["rounds"] for name, result in results.items()} == {"fedavg": 1, "hfldd": 1}


@pytest.mark.slow
def test_an_installed_wheel_bundles_our_packages_and_nothing_else_of_site_packages(site):
    output = site.type(f"python -c {BUNDLE!r}".replace("\\n", "\n"))
    task, path, tops = json.loads(output.splitlines()[-1])
    assert Path(task).is_relative_to(site.folder)
    assert str(Path(__file__).parents[2]) not in path
    assert set(tops) == {"flwr_distill", "pyproject.toml", ".info"}


@pytest.mark.slow
def test_an_installed_wheel_finds_the_presets_and_the_app_for_flower(site):
    app = Path(site.type("flwr-distill app").strip())
    assert app.is_relative_to(site.folder)
    assert (app / "pyproject.toml").exists()
    output = site.type("flwr-distill run --preset no-such-preset", fails=True)
    assert "hfldd-cinic10" in output
