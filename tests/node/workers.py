"""A real worker with an app, for an executor that is none."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from flwr_distill.flower.payload import Payload
from flwr_distill.flower.worker import Note, Worker
from flwr_distill.node.payload import PayloadFile


class Executor:
    """The executor's end of the notes: two tasks, then it ends."""

    def __init__(self, run_config: Mapping[str, Any]) -> None:
        self.tasks = PayloadFile.create()
        self.notes: list[Note] = []
        self._left = 2
        self._run_config = dict(run_config)

    def receive(self) -> list[str]:
        if not self._left:
            raise EOFError
        self._left -= 1
        context = Context(1, 5, {"device": "auto"}, RecordDict(), self._run_config, 1)
        message = Message(RecordDict(), 5, "train")
        payload = Payload.of(message, context)
        about = {"app": ["", "", ""], "task": 1}
        self.tasks.put(replace(payload, about=about).parts())
        return ["task"]

    def send(self, *note: Any) -> None:
        self.notes.append(note)


def notes_of_worker(
    monkeypatch: pytest.MonkeyPatch,
    app: Callable[..., Message],
    device: str,
    run_config: Mapping[str, Any],
) -> list[Note]:
    """What a worker with an app says at the end of each of two tasks."""
    executor: Any = Executor(run_config)
    worker = Worker(executor, executor.tasks, PayloadFile.create(), device)
    monkeypatch.setattr(worker, "_load", lambda *_: app)
    worker.serve()
    return list(executor.notes)
