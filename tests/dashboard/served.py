"""The dashboard's real command, as a process."""

import contextlib
import re
import subprocess
import threading

from flwr_distill.node.processes import stop
from tests.environments import PROGRAM

COMMAND = (*PROGRAM, "dashboard")


@contextlib.contextmanager
def served(*arguments, cwd=None):
    """Address of a dashboard with these arguments, while the block lasts."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    lines, found = [], None
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"dashboard: (\S+)", line):
                break
        timer.cancel()
        assert found, "".join(lines)
        yield found[1]
    finally:
        timer.cancel()
        stop([process])
        process.stdout.close()
