"""The process that serves a queue."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from flwr_distill.fleet.queue.door import FILE, Door
from flwr_distill.fleet.queue.entry import QueueError
from flwr_distill.fleet.queue.file import QueueFile
from flwr_distill.fleet.queue.scheduler import Scheduler
from flwr_distill.flower.control import Control


def serve(
    folder: Path, control: Callable[[], Control], at_once: int, on_start: Callable[[], None]
) -> None:
    """Serve the queue of a folder until SIGTERM or Ctrl-C; its runs then continue.

    The parameters besides `folder` are those of `Scheduler`; `on_start` is called once users may
    call. Raises `QueueError` if the queue is served already.
    """
    ended = threading.Event()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), closing(QueueFile(folder / FILE)) as queue:
        scheduler = Scheduler(queue, control, at_once)
        with Door(folder, queue, scheduler.wake) as door:

            def end(*_: object) -> None:
                ended.set()
                scheduler.wake()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)
            threading.Thread(target=door.serve_forever, daemon=True).start()
            try:
                on_start()
                scheduler.serve(ended)
            finally:
                door.shutdown()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder's queue: two services would start its runs twice."""
    with (folder / "queue.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QueueError("the queue is served already", where=folder) from None
        yield
