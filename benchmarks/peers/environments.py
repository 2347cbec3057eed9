"""Virtual environments of other projects, made where they are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

TORCH = version("torch").partition("+")[0]


class NotInstalledError(Exception):
    """A project cannot be installed here."""


@dataclass(frozen=True)
class Project:
    """A project that needs an environment of its own.

    Parameters
    ----------
    name, version, extras : str
        For pip.
    pythons : tuple of str
        Versions of Python that it runs on, the best one first.
    """

    name: str
    version: str
    extras: str
    pythons: tuple[str, ...]

    @property
    def requirements(self) -> list[str]:
        """The project, with the version of PyTorch that is installed here."""
        return [f"{self.name}[{self.extras}]=={self.version}", f"torch=={TORCH}"]


PFL = Project("pfl", "0.6.0", "pytorch", ("3.12", "3.11"))
BLAZEFL = Project(
    "blazefl",
    "2.0.3",
    "contrib,reproducibility",
    ("3.14t", "3.14", "3.13", "3.12"),  # its threads are for a Python without a global lock
)


def prepare(project: Project, folder: Path) -> Path:
    """Make a project's environment in a folder unless it is there.

    Returns
    -------
    Path
        The environment's folder of commands.

    Raises
    ------
    NotInstalledError
        If there is no Python for it, or pip cannot install it.
    """
    commands = folder / project.name / "bin"
    python = commands / "python"
    if not _has(python, project):
        print(f"Installing {project.name} in {commands.parent}", flush=True)
        _run(_python(project), "-m", "venv", "--clear", commands.parent)
        uv = Path(sys.executable).with_name("uv")
        if uv.exists():  # fast, and its cache has the PyTorch of this environment
            _run(uv, "pip", "install", "--python", python, *project.requirements)
        else:
            _run(python, "-m", "pip", "install", *project.requirements)
    return commands


def _has(python: Path, project: Project) -> bool:
    code = f"from importlib.metadata import version; print(version({project.name!r}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == project.version


def _python(project: Project) -> Path:
    """The best Python that can make environments, on the path or of pyenv."""
    for number in project.pythons:
        name = f"python{number}"
        on_path = shutil.which(name)
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))
        for python in [*([Path(on_path)] if on_path else []), *of_pyenv]:
            works = [str(python), "-c", "import ensurepip, venv"]
            if subprocess.run(works, capture_output=True, check=False).returncode == 0:
                return python
    raise NotInstalledError(f"no Python {' or '.join(project.pythons)}")


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise NotInstalledError(f"{Path(command[0]).name}: {lines[-1]}")
