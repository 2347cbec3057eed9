"""What is installed where a node runs, to see when it changes."""

import os
import sys
from contextlib import suppress

_METADATA = (".dist-info", ".egg-info", ".pth")


def installed_packages() -> frozenset[tuple[str, int]]:
    """Metadata files of the packages on this process's path, with times: installs change them."""
    packages = set()
    for folder in sys.path:
        with suppress(OSError):  # some of the path is not there, or an archive
            for entry in os.scandir(folder or "."):
                if entry.name.endswith(_METADATA):
                    packages.add((entry.path, entry.stat().st_mtime_ns))
    return frozenset(packages)
