"""A worker of a simulation: answers messages to virtual nodes with the ClientApp, one by one.

``python -m flwr_distill.simulation.worker FD FOLDER``, started by `simulation.workers` or forked by
a nursery; FD is a socket, FOLDER is the worker's, in memory.
"""

import gc
import logging
import signal
import socket
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message

from flwr_distill.flower.task_identity import identify
from flwr_distill.node.compiler import put_off_compiler
from flwr_distill.node.kernel import keep_freed
from flwr_distill.protocol.arrays import DecodedArray
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.simulation.frames import Frame, SharedArrays, decode_content, encode_content
from flwr_distill.task.plugin import import_object

MAX_MODELS = 4
"""Models of the server that a worker keeps mapped."""


class Worker:
    """Answers frames of messages.

    Parameters
    ----------
    start : dict
        ``app``, the ClientApp as ``module:name``; ``run_id``, ``run_config``, and the config of
        each node in ``nodes``, by its place.
    folder : Path
        For what it writes; the one above is shared by server and workers.
    """

    def __init__(self, start: dict[str, Any], folder: Path) -> None:
        self._app: Any = import_object(start["app"])
        self._shared = SharedArrays(folder.parent, f"{folder.name}/reply")
        self._run_id, self._run_config = start["run_id"], start["run_config"]
        self._nodes: list[dict[str, Any]] = start["nodes"]
        identify(0, self._run_id, 1)  # as the server, whose messages these are
        self._mapped: OrderedDict[str, dict[str, DecodedArray]] = OrderedDict()

    def answer(self, frame: Frame) -> Frame:
        """The frame of a reply; an exception's text in its place if the app raises one."""
        request, blobs, started = frame.header, bytearray(), time.perf_counter()
        reply: dict[str, Any] = {"id": request["id"]}
        written: list[dict[str, Any]] = []

        def write(record: ArrayRecord) -> dict[str, Any]:
            written.append(self._shared.write(record))
            return written[-1]

        try:
            state = decode_content(request["state"], self._read, frame.blobs)
            context = Context(
                self._run_id,
                request["node"],
                dict(self._nodes[request["place"]]),  # the app may change it
                state,
                dict(self._run_config),
            )
            message = Message(
                decode_content(request["content"], self._read, frame.blobs),
                request["node"],
                request["type"],
                ttl=request["ttl"],
                group_id=request["group"],
            )
            message.metadata.__dict__.update(
                _message_id=request["id"], _run_id=self._run_id, _created_at=request["created"]
            )
            answer = self._app(message, context)
            if answer.has_error():
                reply["error"] = answer.error.code, answer.error.reason
            else:
                reply["content"] = encode_content(answer.content, write, blobs)
            reply["state"] = encode_content(context.state, write, blobs)
        except Exception as error:  # whatever the app raises is its answer
            logging.getLogger("flwr").debug("node %d", request["place"], exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            reply = {"id": request["id"], "error": (UNKNOWN, reason)}
            blobs.clear()
            for record in written:
                self._shared.delete(record["file"])
        reply["seconds"] = time.perf_counter() - started
        return Frame(reply, blobs)

    def take_dataset(self, written: dict[str, Any]) -> None:
        """Use the data set that the server has read."""
        # here: the app is imported first
        from flwr_distill.simulation.dataset import map_dataset
        from flwr_distill.task.source import take_dataset

        take_dataset(map_dataset(written, self._shared))

    def _read(self, written: dict[str, Any]) -> dict[str, DecodedArray]:
        name = written["file"]
        if name not in self._mapped:
            self._mapped[name] = self._shared.read(written)
            if len(self._mapped) > MAX_MODELS:
                self._mapped.popitem(last=False)
        return dict(self._mapped[name])


def main() -> None:
    """Answer until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its workers
    folder = Path(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        start = Frame.receive(connection, folder).header
        logging.getLogger("flwr").setLevel(start["log_level"])
        gc.disable()  # collections would take a fifth of the imports' time, and free nothing
        worker = Worker(start, folder)
        put_off_compiler()
        keep_freed()
        gc.freeze()
        gc.enable()
        Frame({"ready": True}).send(connection, folder)
        while True:
            try:
                frame = Frame.receive(connection, folder)
            except (EOFError, ConnectionError):
                return
            if "dataset" in frame.header:
                worker.take_dataset(frame.header["dataset"])
            else:
                worker.answer(frame).send(connection, folder)


if __name__ == "__main__":
    main()
