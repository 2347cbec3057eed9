"""Takes all the memory that a process may have."""

import resource
from pathlib import Path


def allocate():
    """Allocate until the system refuses: at 200 MB more than now, lest the machine suffers."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (200 << 20)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
    taken = []
    try:
        while True:
            taken.append(bytearray(16 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
