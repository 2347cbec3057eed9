"""A real worker with an app, for an executor that is none."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from flwr.app import Context, Message, RecordDict

import flwr_distill.flower.worker
from flwr_distill.flower.line_1_32.node.appio import AppIo
from flwr_distill.flower.worker import Note, Worker


class Executor:
    """The executor's end of the pipe: two tasks, then it ends."""

    def __init__(self) -> None:
        self._tasks = [("token", "")] * 2
        self.notes: list[Note] = []

    def receive(self) -> tuple[str, str]:
        if not self._tasks:
            raise EOFError
        return self._tasks.pop()

    def send(self, *note: Any) -> None:
        if note[0] != "pushing":
            self.notes.append(cast(Note, note))


def notes_of_worker(
    monkeypatch: pytest.MonkeyPatch,
    app: Callable[..., Message],
    device: str,
    run_config: Mapping[str, Any],
) -> list[Note]:
    """What a worker with an app says at the end of each of two tasks."""

    def pull(*_: Any) -> Any:
        context = Context(1, 5, {"device": "auto"}, RecordDict(), dict(run_config), 1)
        return Message(RecordDict(), 5, "train"), context, None, None

    monkeypatch.setattr(flwr_distill.flower.worker, "_pull", pull)
    for name in ("push_message", "push_task_output"):
        monkeypatch.setattr(flwr_distill.flower.worker, name, lambda *_, **__: None)
    executor: Any = Executor()
    worker = Worker(AppIo("127.0.0.1:1", None), executor, device)
    monkeypatch.setattr(worker, "_load", lambda *_: app)
    worker.serve()
    return list(executor.notes)
