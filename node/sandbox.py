"""Sandbox of the process that runs the app: no network, no files but its data.

Bubblewrap (``bwrap``) makes it of Linux namespaces. Inside are, read-only, the system's libraries,
Python, the node's data, its certificates for links, what the policy names as ``readable``, and the
run's bundle and files (`node.run_sandbox`). Outbox, account, the key for the SuperLink, environment
and other runs are outside. What the app writes is hostile to the outside (`storage.untrusted`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from flwr_distill.node.nursery import NURSERY
from flwr_distill.node.settings import NodeSettings
from flwr_distill.storage.store import SECRET, NodeStore

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/ssl/certs", "/etc/nvidia"),
)
_PACKAGES = ("site-packages", "dist-packages")
_MODULES = (".py", ".so", ".zip", ".egg")
_GPU_DEVICES = ("nvidia*", "dri", "kfd")
_VARIABLES = (
    *("PATH", "LANG", "LC_", "TZ", "PYTHON", "TORCH", "PYTORCH_", "CUDA", "NVIDIA_", "OMP_"),
    *("MKL_", "OPENBLAS_", "GRPC_", "FLWR_HOME", "FLWR_LOG_LEVEL", "FLWR_TELEMETRY_ENABLED"),
    "FLWR_DISABLE_UPDATE_CHECK",
)
"""Beginnings of environment variables' names; others may hold passwords."""
_HOME = "/run/home"
"""Where the app may write temporary files; packages may lie in /tmp."""
_MAX_TEMPORARY = 1 << 30
"""Bytes in each temporary folder of a sandbox, in memory; bubblewrap 0.7 bounds them."""
_START_TIMEOUT = 20.0


def why_no_sandbox() -> str:
    """Why this machine allows no sandbox; empty if it does."""
    if (bwrap := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed (on Debian and Ubuntu: apt install bubblewrap)"
    try:
        trial = subprocess.run(
            [bwrap, *_namespaces(), *_read_only(_SYSTEM), "true"],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}"
    if trial.returncode != 0:
        return f"bubblewrap may not make one: {trial.stderr.strip() or trial.returncode}"
    return ""


def why_exposed(settings: NodeSettings) -> str:
    """Why an app in a sandbox could read a secret of the node; '' if it cannot."""
    state, login = settings.state_dir, settings.auth_key
    for path in _readable(settings):
        if state.is_relative_to(path.resolve()):
            return f"the node's state directory {state} is in {path}: move one of them"
    if login is None:
        return ""
    for path in [*map(Path, _SYSTEM), *_python(), *_readable(settings)]:
        if login.is_relative_to(path.resolve()):
            return f"auth-key={login} is in {path}: move the key"
    links = settings.peer_key and _public(settings.peer_key)
    if links and links == _public(login):
        return (
            f"auth-key={login} and peer-key={settings.peer_key} are one key, and apps can read the "
            "second: give the node two, as `flwr-distill certs` makes them"
        )
    return ""


def sandbox_command(settings: NodeSettings, environment: Mapping[str, str]) -> list[str]:
    """The command that runs the one after it in a sandbox.

    `environment` is that of the node's processes; variables that may be secrets stay outside.
    """
    passed = {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}
    devices = [path for name in _GPU_DEVICES for path in Path("/dev").glob(name)]
    return [
        *("bwrap", *_namespaces()),
        *("--dev", "/dev", "--proc", "/proc"),
        *(word for path in devices for word in ("--dev-bind-try", str(path), str(path))),
        *_temporary("/tmp", "/dev/shm", _HOME),
        *("--remount-ro", "/dev", "--chdir", _HOME, "--clearenv"),
        *_read_only([*_SYSTEM, *_python()]),
        *_state(settings.state_dir),
        *_read_only(_readable(settings)),
        *(("--tmpfs", environment[NURSERY]) if NURSERY in environment else ()),  # it forks outside
        *("--setenv", "HOME", _HOME, "--setenv", "TMPDIR", _HOME, "--setenv", "USER", "app"),
        *(word for name, value in passed.items() for word in ("--setenv", name, value)),
    ]


def _namespaces() -> list[str]:
    return [
        *("--die-with-parent", "--unshare-user-try", "--unshare-cgroup-try", "--unshare-net"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"),
    ]


def _read_only(paths: Iterable[str | Path]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind-try", str(path), str(path))]


def _python() -> list[Path]:
    """Where this Python, its packages, and others on its path are.

    Of a checkout on the path only packages and modules are inside: beside them may be keys and
    data.
    """
    installed = [Path(sys.base_prefix), Path(sys.prefix)]
    installed += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    folders = [Path(path) for path in sys.path if Path(path).is_absolute()]
    inside = list(installed)
    for folder in folders:
        if _is_installation(folder) or any(folder.is_relative_to(each) for each in installed):
            inside.append(folder)
        else:
            inside += _packages_in(folder)
    return list(dict.fromkeys(inside))


def _is_installation(folder: Path) -> bool:
    return folder.name in _PACKAGES or any(folder.glob("*.dist-info"))


def _packages_in(folder: Path) -> Iterator[Path]:
    if folder.is_file():  # an archive
        yield folder
    elif folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in _MODULES or (path / "__init__.py").is_file():
                yield path


def _readable(settings: NodeSettings) -> list[Path]:
    root = settings.node_config.get("data-root")
    files = [
        *map(Path, settings.policy.readable),
        *(settings.data, Path(str(root)).expanduser().absolute() if root else None),
        *(settings.peer_authority, settings.peer_certificate, settings.peer_key),
        *(settings.peer_revocations, settings.root_certificates),
        settings.edge,
        *settings.files.values(),
    ]
    return [path for path in files if path is not None]


def _public(file: Path) -> bytes | None:
    """The public key of a private one, in either format; None if it cannot be read."""
    content = file.read_bytes()
    for load in (load_pem_private_key, load_ssh_private_key):
        try:
            key = load(content, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return None


def _state(folder: Path) -> list[str]:
    """An empty state directory, with what all runs see of the node's."""
    NodeStore.open(folder, 0, 0).secret()  # here: a sandbox cannot write beside its folders
    return ["--tmpfs", str(folder), *_read_only([folder / SECRET])]


def _temporary(*paths: str) -> list[str]:
    usage = subprocess.run(
        ["bwrap", "--help"], capture_output=True, text=True, timeout=_START_TIMEOUT, check=False
    )
    size = ["--size", str(_MAX_TEMPORARY)] if "--size" in usage.stdout else []
    return [word for path in paths for word in (*size, "--tmpfs", path)]
