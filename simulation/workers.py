"""Worker processes of a simulation: each takes the next message as soon as it is free."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count as counter
from logging import WARNING
from pathlib import Path
from typing import Any, Self

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common import log

from flwr_distill.node.nursery import NURSERY, SIMULATION, VIRTUAL_WORKER, can_fork
from flwr_distill.node.processes import Process, kill_group, start_bound, start_nursery, stop
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.simulation.dataset import map_dataset, write_dataset
from flwr_distill.simulation.frames import Frame, SharedArrays, decode_content, encode_content
from flwr_distill.simulation.memory import memory_folder
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.source import ReadDataset

GRACE = 30.0
"""Seconds beyond a message's time-to-live after which a worker that has not answered is killed."""
AHEAD = 2
"""Messages that a worker has at a time: the one it answers and the next."""
MAX_DEATHS = 3
"""Deaths for each worker, without an answer between them, after which the run fails."""
Config = Mapping[str, bool | int | float | str]
OnAnswer = Callable[[Message, float], None]
CLIENT_APP = "flwr_distill.client.app:app"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""So that results do not depend on the number of workers, which share the cores."""


class WorkerError(ReportedError):
    """Workers cannot start, or keep dying."""


@dataclass(eq=False)
class _Task:
    message: Message
    place: int
    frame: Frame
    files: list[str]
    due: float


@dataclass(eq=False)
class _Worker:
    process: Process
    connection: socket.socket
    folder: Path
    """For what it writes, and for what is only for it."""
    tasks: deque[_Task] = field(default_factory=deque)
    is_ready: bool = False


class Workers:
    """Answers messages to virtual nodes in worker processes.

    Messages that have taken longest so far go first. A node's messages go to the worker that has
    loaded its data, unless another worker would be idle; it has one message at a time. Where forks
    are safe, workers are forked for the first message from a process that has imported the app
    meanwhile.

    Parameters
    ----------
    nodes : Mapping[int, Mapping[str, bool | int | float | str]]
        Node config of each virtual node, by Flower's node id.
    run_id : int
        Of the run.
    run_config : Mapping[str, bool | int | float | str]
        Of the run.
    count : int
        Processes.
    app : str (default: CLIENT_APP)
        The ClientApp, as ``module:name``.
    on_answer : callable, optional
        Called with each answered message, and the seconds that its worker took.
    """

    def __init__(
        self,
        nodes: Mapping[int, Config],
        run_id: int,
        run_config: Config,
        count: int,
        app: str = CLIENT_APP,
        on_answer: OnAnswer = lambda message, seconds: None,
    ) -> None:
        self._on_answer = on_answer
        self._places = {node: place for place, node in enumerate(nodes)}
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(memory_folder())
        self._shared = SharedArrays(self._folder, "server")
        self._start = {
            "app": app,
            "run_id": run_id,
            "run_config": dict(run_config),
            "nodes": [dict(config) for config in nodes.values()],
            "log_level": max(logging.getLogger("flwr").level, WARNING),
        }
        self._pending: list[_Task] = []
        self._written: dict[int, tuple[ArrayRecord, dict[str, Any]]] = {}
        self._uses: dict[str, int] = {}
        self._states: dict[int, RecordDict] = {}
        self._seconds: dict[tuple[int, str], float] = {}
        self._homes: dict[int, _Worker] = {}
        self._deaths = 0
        self._replies: list[tuple[str, RecordDict | Error]] = []
        self._selector = selectors.DefaultSelector()
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # plug-ins are found as by the server
        self._environment = {**os.environ, **ONE_THREAD, **path}
        self._count = count
        self._numbers = counter()
        self._workers: list[_Worker] = []
        self._dataset: Frame | None = None
        if can_fork():
            self._start_nursery(app)
        else:
            self._start_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self, read: ReadDataset) -> ReadDataset:
        """Have all workers map a data set that this process has read; return it, mapped.

        It is returned as it is if there is no room for it, and workers then read it.
        """
        written = write_dataset(read, self._shared, self._folder)
        if written is None:
            return read
        self._dataset = Frame({"dataset": written})
        for worker in self._workers:
            with suppress(ConnectionError):  # one that has died is replaced when it is to work
                self._dataset.send(worker.connection, worker.folder)
        return map_dataset(written, self._shared)

    def submit(self, messages: Sequence[Message]) -> None:
        """Queue messages; their ids are in their metadata."""
        self._start_workers()
        for message in messages:
            self._pending.append(self._task(message))
        self._written.clear()
        # Those that may take longest first; of those not yet seen, in the order of the messages.
        self._pending.sort(key=lambda task: self._cost(task), reverse=True)
        self._assign()

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Wait for replies; return them by message id, as soon as there is one."""
        readable = self._selector.select(0 if self._replies else max(seconds, 0))
        for key, _ in readable:
            worker: _Worker = key.data
            try:
                frame = Frame.receive(worker.connection, worker.folder)
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if "ready" in frame.header:
                worker.is_ready = True
            elif not worker.tasks or frame.header["id"] != worker.tasks[0].frame.header["id"]:
                self._replace(worker, "a fork of it has answered")
            else:
                self._deaths = 0
                self._replies.append(self._reply(worker, frame))
        for worker in list(self._workers):
            if worker.tasks and worker.tasks[0].due < time.monotonic():
                self._replace(worker, "no answer in time")
            elif not readable and worker.process.poll() is not None:
                self._replace(worker)  # a fork of it has the socket, too
        self._assign()
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.connection.close()
        stop([worker.process for worker in self._workers])
        self._selector.close()
        self._resources.close()

    def _start_nursery(self, app: str) -> None:
        module = app.partition(":")[0]
        nursery = start_nursery(self._folder, SIMULATION, [module], env=self._environment)
        self._resources.callback(stop, [nursery])
        self._environment[NURSERY] = str(self._folder)

    def _start_workers(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(self._spawn())

    def _spawn(self) -> _Worker:
        folder = self._folder / f"worker-{next(self._numbers)}"
        folder.mkdir()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", VIRTUAL_WORKER]
            process = start_bound(
                [*command, str(theirs.fileno()), str(folder)],
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )
        worker = _Worker(process, ours, folder)
        Frame(self._start).send(ours, folder)
        if self._dataset:
            self._dataset.send(ours, folder)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _task(self, message: Message) -> _Task:
        blobs, files = bytearray(), []
        metadata = message.metadata
        node = metadata.dst_node_id

        def write(record: ArrayRecord) -> dict[str, Any]:
            if id(record) not in self._written:
                self._written[id(record)] = record, self._shared.write(record)
            written = self._written[id(record)][1]
            files.append(written["file"])
            return written

        header = {
            "id": metadata.message_id,
            "place": self._places[node],
            "node": node,
            "type": metadata.message_type,
            "ttl": metadata.ttl,
            "group": metadata.group_id,
            "created": metadata.created_at,
            "content": encode_content(message.content, write, blobs),
        }
        for file in files:
            self._uses[file] = self._uses.get(file, 0) + 1
        due = time.monotonic() + metadata.ttl + GRACE
        return _Task(message, self._places[node], Frame(header, blobs), files, due)

    def _cost(self, task: _Task) -> float:
        return self._seconds.get((task.place, task.message.metadata.message_type), 0.0)

    def _assign(self) -> None:
        """Give pending messages to workers that have room, the freest first."""
        while self._pending:
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) >= AHEAD or (task := self._next_for(worker)) is None:
                return
            self._pending.remove(task)
            if task.due < time.monotonic() + GRACE:
                self._refuse(task, "its message has expired before a worker was free")
                continue
            self._homes[task.place] = worker
            self._add_state(task)
            try:
                task.frame.send(worker.connection, worker.folder)
            except ConnectionError:
                self._pending.insert(0, task)
                self._replace(worker)
            else:
                worker.tasks.append(task)

    def _next_for(self, worker: _Worker) -> _Task | None:
        """The next message for a worker, to a node that has no other: of its own nodes if any."""
        busy = {task.place for each in self._workers for task in each.tasks}
        first = None
        for task in self._pending:
            if task.place not in busy:
                if self._homes.get(task.place, worker) is worker:
                    return task
                first = first or task
        return first

    def _add_state(self, task: _Task) -> None:
        """Put the node's state into its message, as the message before has left it."""
        state = self._states.get(task.message.metadata.dst_node_id, RecordDict())
        encoded = encode_content(state, self._shared.write, task.frame.blobs)
        task.frame.header["state"] = encoded
        for _, record in encoded:
            if "file" in record:
                task.files.append(record["file"])
                self._uses[record["file"]] = 1

    def _reply(self, worker: _Worker, frame: Frame) -> tuple[str, RecordDict | Error]:
        task, header = worker.tasks.popleft(), frame.header
        metadata = task.message.metadata
        self._release(task)
        self._seconds[task.place, metadata.message_type] = header["seconds"]
        self._on_answer(task.message, header["seconds"])
        if "state" in header:
            state = decode_content(header["state"], self._take, frame.blobs)
            self._states[metadata.dst_node_id] = state
        if "error" in header:
            return metadata.message_id, Error(*header["error"])
        return metadata.message_id, decode_content(header["content"], self._take, frame.blobs)

    def _take(self, written: dict[str, Any]) -> Any:
        arrays = self._shared.read(written)
        self._shared.delete(written["file"])
        return arrays

    def _release(self, task: _Task) -> None:
        for file in task.files:
            self._uses[file] -= 1
            if not self._uses[file]:
                del self._uses[file]
                self._shared.delete(file)

    def _replace(self, worker: _Worker, fault: str = "") -> None:
        """Start a worker in place of a dead one, whose current message gets an error.

        One with a fault is killed.

        Raises
        ------
        WorkerError
            If workers keep dying.
        """
        self._selector.unregister(worker.connection)
        worker.connection.close()
        if not fault:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=5)
            self._deaths += 1
        kill_group(worker.process)  # what it has started, too
        shutil.rmtree(worker.folder, ignore_errors=True)
        code = worker.process.returncode or 0
        reason = fault or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        if not worker.is_ready or self._deaths > MAX_DEATHS * self._count:
            remedy = "free some memory, or take fewer --workers" if code < 0 else "see above why"
            raise WorkerError(f"a worker of the simulation has died ({reason})", remedy=remedy)
        log(WARNING, "A worker of the simulation has died (%s); another starts", reason)
        self._workers[self._workers.index(worker)] = self._spawn()
        self._homes = {place: w for place, w in self._homes.items() if w is not worker}
        if worker.tasks:
            self._refuse(worker.tasks.popleft(), f"its worker has died ({reason})")
        self._pending[:0] = worker.tasks  # not yet started

    def _refuse(self, task: _Task, reason: str) -> None:
        self._release(task)
        self._replies.append((task.message.metadata.message_id, Error(UNKNOWN, reason)))
