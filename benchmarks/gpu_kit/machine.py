"""Print what this machine computes with, as JSON: ``python -m benchmarks.gpu_kit.machine``.

In a process of its own, because asking a GPU for its name takes some of its memory.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def machine() -> dict[str, Any]:
    """Versions and hardware; ``gpu`` is None without a usable one."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "gpu_gib": round(torch.cuda.mem_get_info(0)[1] / 2**30, 1) if gpu else None,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def driver() -> str | None:
    """Version of NVIDIA's driver, such as 580.159.04; None without one."""
    found = re.search(r"\d+\.\d+\S*", DRIVER.read_text()) if DRIVER.exists() else None
    return found and found[0]


def read_machine() -> dict[str, Any]:
    """The same, from another process."""
    command = [sys.executable, "-m", "benchmarks.gpu_kit.machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(machine()))
