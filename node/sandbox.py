"""Boxes in the process that runs the app: no network but its SuperNode, no files but its data.

A box is made of Linux namespaces by bubblewrap (``bwrap``), which needs no root where the machine
lets users make them. Inside are read-only: the system's libraries, Python and its packages, the
node's data, its certificates for links, and what the policy names as ``readable``; and, to write,
what strategies keep in the state directory. The node's log and account of what has left it, its
key for the SuperLink, its environment and other users' processes are outside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from links.store import LASTING, SECRET, NodeStore
from node.door import INSIDE
from node.nursery import NURSERY
from node.settings import NodeSettings

DOOR = "door"
"""Folder in a state directory with the box's way out."""

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/ssl/certs", "/etc/nvidia"),
)
_GPU_DEVICES = ("nvidia*", "dri", "kfd")
_VARIABLES = (
    *("PATH", "LANG", "LC_", "TZ", "PYTHON", "TORCH", "PYTORCH_", "CUDA", "NVIDIA_", "OMP_"),
    *("MKL_", "OPENBLAS_", "GRPC_", "FLWR_HOME", "FLWR_LOG_LEVEL", "FLWR_TELEMETRY_ENABLED"),
    "FLWR_DISABLE_UPDATE_CHECK",
)
"""Beginnings of environment variables' names; others may hold passwords."""
_HOME = "/run/home"
"""Where the app may write what nobody keeps; packages may lie in /tmp."""
_STARTS_WITHIN = 20.0


def why_no_box() -> str:
    """Why no box can be made on this machine; an empty text if one can."""
    if (bwrap := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed (on Debian and Ubuntu: apt install bubblewrap)"
    try:
        trial = subprocess.run(
            [bwrap, *_namespaces(), *_read_only(_SYSTEM), "true"],
            capture_output=True,
            text=True,
            timeout=_STARTS_WITHIN,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}"
    if trial.returncode != 0:
        return f"bubblewrap may not make one: {trial.stderr.strip() or trial.returncode}"
    return ""


def box(settings: NodeSettings, environment: Mapping[str, str]) -> list[str]:
    """The command that boxes in the one behind it; see the module for what is inside.

    Parameters
    ----------
    environment : Mapping[str, str]
        Of the node's processes; what may hold secrets is left out.
    """
    kept = {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}
    devices = [path for name in _GPU_DEVICES for path in Path("/dev").glob(name)]
    return [
        *("bwrap", *_namespaces()),
        *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"),
        *("--tmpfs", _HOME, "--chdir", _HOME, "--clearenv"),
        *(word for path in devices for word in ("--dev-bind-try", str(path), str(path))),
        *_read_only([*_SYSTEM, *_python(), *settings.policy.readable]),
        *_state(settings.state_dir),
        *_read_only(_own_files(settings)),
        *(("--tmpfs", environment[NURSERY]) if NURSERY in environment else ()),  # it forks outside
        *("--setenv", "HOME", _HOME, "--setenv", "TMPDIR", _HOME, "--setenv", "USER", "app"),
        *(word for name, value in kept.items() for word in ("--setenv", name, value)),
    ]


def _namespaces() -> list[str]:
    return [
        *("--die-with-parent", "--unshare-user-try", "--unshare-cgroup-try", "--unshare-net"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"),
    ]


def _read_only(paths: Iterable[str | Path]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind-try", str(path), str(path))]


def _python() -> list[str]:
    """Where this Python, its packages, and this project are."""
    folders = [sys.base_prefix, sys.prefix, *sys.path]
    return list(dict.fromkeys(path for path in folders if Path(path).is_absolute()))


def _own_files(settings: NodeSettings) -> list[Path]:
    """Data, what links read, and an edge's sockets; not the node's key for the SuperLink."""
    root = settings.node_config.get("data-root")
    files = [
        *(settings.data, Path(str(root)).expanduser().absolute() if root else None),
        *(settings.peer_certificate, settings.peer_key, settings.peer_revocations),
        settings.root_certificates,
        settings.edge,
        *settings.files.values(),
    ]
    return [path for path in files if path is not None]


def _state(folder: Path) -> list[str]:
    """An empty state directory, with what strategies keep in the node's."""
    NodeStore.open(folder, 0, 0).secret()  # made here: a box cannot make files beside its folders
    words = ["--tmpfs", str(folder)]
    for name in ("runs", LASTING, "flower/apps"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        words += ["--bind", str(folder / name), str(folder / name)]
    (folder / DOOR).mkdir(mode=0o700, exist_ok=True)
    words += ["--ro-bind", str(folder / DOOR), str(INSIDE)]
    return [*words, *_read_only([folder / SECRET])]
