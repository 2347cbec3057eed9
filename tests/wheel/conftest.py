"""What is published, built once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Build a wheel or an sdist of a source tree, without an index; give the file."""

    def run(target, source=ROOT):
        folder = tmp_path_factory.mktemp(target)
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (file,) = folder.iterdir()
        return file

    return run


@pytest.fixture(scope="session")
def wheel(build):
    """The wheel of this checkout."""
    return build("wheel")
