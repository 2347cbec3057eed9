"""The lock holds on machines that are not at hand, and the Makefile finds their Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = {
    "x86_64-manylinux_2_28": ("linux", "Linux", "x86_64"),
    "aarch64-manylinux_2_28": ("linux", "Linux", "aarch64"),
    "aarch64-apple-darwin": ("darwin", "Darwin", "arm64"),
}
PYTHONS = ["3.11", "3.12", "3.13"]
MACOS = "14.0"
"""The oldest that PyTorch's wheels are for."""
SOURCE_ONLY = {"yattag"}
"""Pure Python, without a wheel: a machine without a compiler can build it."""


def requirements(text):
    return [Requirement(line) for line in text.splitlines() if line]


def versions(packages):
    return {package.name: str(package.specifier) for package in packages}


def locked_for(lock, platform, python):
    """The part of the lock whose markers hold on a platform with a Python."""
    sys_platform, platform_system, platform_machine = PLATFORMS[platform]
    environment = {
        "sys_platform": sys_platform,
        "platform_system": platform_system,
        "platform_machine": platform_machine,
        "os_name": "posix",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    return [p for p in lock if p.marker is None or p.marker.evaluate(environment)]


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_lock_is_what_a_platform_needs_and_can_install(platform, python):
    """What uv resolves within the lock is the lock, from wheels."""
    lock = requirements((ROOT / "requirements.lock").read_text())
    command = [
        *(Path(sys.executable).with_name("uv"), "pip", "compile", "pyproject.toml"),
        *("--all-extras", "--constraint", "requirements.lock", "--no-python-downloads"),
        *("--python-platform", platform, "--python-version", python),
        *("--no-header", "--no-annotate", "--no-emit-index-url"),
        *(f"--only-binary={package.name}" for package in lock if package.name not in SOURCE_ONLY),
    ]
    for network in (["--offline"], []):  # what uv remembers of the index is enough, and quick
        resolved = subprocess.run(
            [*command, *network],
            cwd=ROOT,
            env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS},
            capture_output=True,
            text=True,
            check=False,
        )
        if resolved.returncode == 0:
            break
    if re.search("Failed to fetch|error sending request|dns error", resolved.stderr):
        pytest.skip(f"NOT CHECKED, the package index was not reached: {resolved.stderr[-300:]}")
    assert resolved.returncode == 0, resolved.stderr
    needed = versions(requirements(resolved.stdout))
    assert needed == versions(locked_for(lock, platform, python))


def test_the_lock_names_no_package_host():
    assert "://" not in (ROOT / "requirements.lock").read_text()


@pytest.fixture
def make(tmp_path):
    """`make --dry-run setup` with these Pythons on the path; True if one has the module venv."""

    def run(pythons, *arguments):
        for name, has_venv in pythons.items():
            file = tmp_path / name
            file.write_text(f"#!/bin/sh\nexit {0 if has_venv else 1}\n")
            file.chmod(0o755)
        command = [shutil.which("make"), "--dry-run", "setup", f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_make_takes_the_newest_python_that_can_make_an_environment(make):
    result = make({"python3.13": False, "python3.12": True, "python3.11": True})
    assert "\npython3.12 -m venv" in f"\n{result.stdout}"


def test_make_takes_the_python_that_is_named(make):
    result = make({"python3.12": True}, "PYTHON=/opt/python")
    assert "\n/opt/python -m venv" in f"\n{result.stdout}"


def test_make_says_which_pythons_it_looked_for(make):
    result = make({"python3.12": False})
    assert result.returncode != 0
    assert "looked for python3.13 python3.12 python3.11 with the modules venv" in result.stderr
