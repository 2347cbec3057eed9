"""Our ServerApp, which never returns after its first round."""

import os
import threading
from pathlib import Path

from .rounds import app_that_does


def hang(server_round):
    if server_round == 1:
        Path(os.environ["FAULTS"], "hangs").touch()
        threading.Event().wait()


app = app_that_does(hang)
