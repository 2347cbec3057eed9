"""Our ServerApp, which never returns after its first round."""

import os
import threading
from pathlib import Path

import flwr_distill.server.app
import flwr_distill.server.task

FOLDER = Path(os.environ["FAULTS"])


def _faulty(evaluation):
    def create(*arguments):
        evaluate = evaluation(*arguments)

        def evaluated(server_round, arrays):
            if server_round == 1:
                (FOLDER / "hangs").touch()
                threading.Event().wait()
            return evaluate(server_round, arrays)

        return evaluated

    return create


flwr_distill.server.task.server_evaluation = _faulty(flwr_distill.server.task.server_evaluation)

app = flwr_distill.server.app.app
