"""Our ServerApp, which waits after each round until the test lets it continue."""

import os
import time
from pathlib import Path

import flwr_distill.server.app
import flwr_distill.server.task

FOLDER = Path(os.environ["FAULTS"])


def _waiting(evaluation):
    def create(*arguments):
        evaluate = evaluation(*arguments)

        def evaluated(server_round, arrays):
            (FOLDER / "pid").write_text(str(os.getpid()))
            (FOLDER / "pid").rename(FOLDER / f"over.{server_round}")
            while not (FOLDER / f"go.{server_round}").exists():
                time.sleep(0.05)
            return evaluate(server_round, arrays)

        return evaluated

    return create


flwr_distill.server.task.server_evaluation = _waiting(flwr_distill.server.task.server_evaluation)

app = flwr_distill.server.app.app
