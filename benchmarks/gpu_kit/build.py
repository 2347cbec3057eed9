"""Build the kit for a GPU machine without internet.

``python -m benchmarks.gpu_kit.build --data-root DIR`` (``make gpu-kit DATA_ROOT=DIR``)

Writes ``.gpu-kit``: wheels of what this project needs and such a machine does not have, in the
versions of this environment, those of the project and its baselines, and the files of MNIST.
Copy it there with the checkout, whose code goes before the wheel's; ``make gpu`` finds it.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / ".gpu-kit"
MAX_MEGABYTES = 45
PYTHON = "3.12"
MACHINE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON}.0",
    "python_version": PYTHON,
    "sys_platform": "linux",
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
PRESENT = [
    *("torch", "torchvision", "numpy", "scikit-learn", "matplotlib", "tensorboard", "onnx"),
    *("pyarrow", "pandas", "psutil", "pytest", "safetensors", "jinja2", "grpcio"),
]
"""Packages of the GPU machine, besides what these need."""
REPLACED = {"protobuf"}
"""Present there, but newer than Flower allows."""
UNUSED = {"uv"}
"""Flower requires it to install an app's dependencies, which is off; it is large."""
TEST_TOOLS = ["hypothesis", "pytest-timeout"]
MNIST = Path("MNIST") / "raw"


def closure(requirements: Iterable[str], without: Collection[str] = ()) -> dict[str, str]:
    """Installed versions of packages and of all that they need on the GPU machine.

    Parameters
    ----------
    requirements : Iterable[str]
        As in a project file: ``flwr>=1.32``.
    without : Collection[str] (default: ())
        Canonical names to leave out, with what only they need.
    """
    versions: dict[str, str] = {}
    queue = [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in without or name in versions:
            continue
        versions[name] = metadata.version(name)
        extras = ("", *requirement.extras)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({**MACHINE, "extra": e}) for e in extras):
                queue.append(needed)
    return versions


def wheels() -> dict[str, str]:
    """Versions of the packages that the kit brings, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["partitions"]]
    present = closure(PRESENT).keys() - REPLACED
    return closure(requirements + TEST_TOOLS, present | UNUSED)


def download(versions: dict[str, str], folder: Path) -> None:
    """Download a wheel of each package for the GPU machine."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
        + ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
        + [*platforms, f"--dest={folder}"]
        + [f"{name}=={version}" for name, version in sorted(versions.items())],
        check=True,
    )


def main() -> None:
    """Build the kit and print its size."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_kit.build", description=__doc__)
    parser.add_argument(
        "--data-root", type=Path, required=True, metavar="DIR", help=f"folder with {MNIST}"
    )
    parser.add_argument("--kit", type=Path, default=KIT, help="where to write it")
    arguments = parser.parse_args()
    mnist = arguments.data_root / MNIST
    if not (files := sorted(mnist.glob("*-ubyte.gz"))):
        parser.error(f"--data-root: {mnist} has no *-ubyte.gz, the files of MNIST")

    kit: Path = arguments.kit
    shutil.rmtree(kit, ignore_errors=True)
    (kit / "data" / MNIST).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, kit / "data" / MNIST / file.name)
    download(wheels(), kit / "wheels")
    uv = Path(sys.executable).with_name("uv")
    for project in (ROOT, ROOT / "baselines"):
        subprocess.run(
            [uv, "build", "-q", "--wheel", "--out-dir", kit / "wheels", project], check=True
        )
    (kit / "wheels" / ".gitignore").unlink(missing_ok=True)

    number = len(list((kit / "wheels").iterdir()))
    megabytes = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file()) / 1e6
    print(f"{kit}: {number} wheels and {len(files)} files of MNIST, {megabytes:.1f} MB")
    if megabytes > MAX_MEGABYTES:
        sys.exit(f"{kit} is larger than {MAX_MEGABYTES} MB: leave a package or data out")


if __name__ == "__main__":
    main()
