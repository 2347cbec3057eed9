"""Our ServerApp, which waits after each round until the test lets it continue."""

import os
import time
from pathlib import Path

from .rounds import app_that_does

FOLDER = Path(os.environ["FAULTS"])


def wait(server_round):
    (FOLDER / "pid").write_text(str(os.getpid()))
    (FOLDER / "pid").rename(FOLDER / f"over.{server_round}")
    while not (FOLDER / f"go.{server_round}").exists():
        time.sleep(0.05)


app = app_that_does(wait)
