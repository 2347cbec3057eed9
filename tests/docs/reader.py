"""A reader at a terminal: types commands into a shell, and waits for what they say."""

import os
import signal
import subprocess
import time
from pathlib import Path


class Reader:
    """Types commands in a folder; `close` ends whatever still runs.

    What changes the shell itself (`cd`, `export`, `source`) holds for all that follows. A command
    that stays, or takes too long, is left running once it has output `until`.
    """

    def __init__(self, folder, **env):
        self.folder = Path(folder)
        self.env = {**os.environ, "COLUMNS": "160", **env}
        self._shell = ["set -e"]
        self._running = []

    def type(self, text, *, until=None, fails=False, timeout=300):
        """Run a command; return what it output."""
        log = self.folder / f"output-{time.monotonic_ns()}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", "\n".join([*self._shell, text])],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        deadline = time.monotonic() + timeout
        while process.poll() is None and not (until and until in log.read_text(errors="replace")):
            assert time.monotonic() < deadline, (
                f"{text}: not done in {timeout} s:\n{log.read_text()}"
            )
            time.sleep(0.1)
        output = log.read_text(errors="replace")
        if until is None:
            assert (process.returncode != 0) == fails, f"{text}: {process.returncode}\n{output}"
        else:
            assert until in output, f"{text}: {output}"
        if text.split()[0] in ("cd", "export", "source"):
            self._shell.append(text)
        return output

    def close(self):
        """End what still runs, with Ctrl-C first."""
        for send in (signal.SIGINT, signal.SIGKILL):
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, send)
            deadline = time.monotonic() + 20
            for process in self._running:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
