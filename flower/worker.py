"""The warm child of a node: torch, the app, its data and its CUDA context, kept between messages.

Started by the executor, with which it exchanges notes (`node.notes`), and messages and replies in
files (`node.payload`). It has no connection to the SuperNode. Of our package it imports only
`flower` and `node`, before the app, which cannot replace them; everything else comes from the app
bundle.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from logging import ERROR

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.supercore.utils import get_flwr_home

from flwr_distill.flower.payload import Payload
from flwr_distill.flower.task_identity import identify
from flwr_distill.node.bundle import folder_of_bundles, prefer
from flwr_distill.node.compiler import put_off_compiler
from flwr_distill.node.device import UnfitError, take_device
from flwr_distill.node.gpus import give_memory_back, is_cuda_lost, is_out_of_memory, memory_remedy
from flwr_distill.node.kernel import keep_freed, trim_heap
from flwr_distill.node.notes import Notes, shortened
from flwr_distill.node.payload import PayloadFile
from flwr_distill.node.remedies import explained

Note = tuple[str, int, str]
"""``ready`` (with the device), ``unfit``, ``failed``, ``lost`` (failed, and this process is
unusable) or ``done``; an error code; a reason."""

BATCH_SIZE = "train.batch-size"
"""The run-config key that an error names when a GPU's memory does not suffice."""


class Worker:
    """Runs one app bundle's ClientApp on a device."""

    def __init__(self, notes: Notes, tasks: PayloadFile, replies: PayloadFile, device: str) -> None:
        self._notes = notes
        self._tasks = tasks
        self._replies = replies
        self._device = device
        self._app: ClientApp | None = None

    def serve(self) -> None:
        """Serve tasks until the executor ends, or CUDA fails for good."""
        while True:
            try:
                self._notes.receive()
            except EOFError:
                return
            note = self._serve_task()
            self._notes.send(*note)
            if note[0] == "lost":
                return
            trim_heap()

    def _serve_task(self) -> Note:
        """Serve a task; return the last note."""
        began = time.monotonic()
        batch_size: object = None
        try:
            payload = Payload.from_parts(self._tasks.take())
            context = payload.context
            identify(payload.about["task"], context.run_id, context.node_id)
            message = payload.message(keep=False)
            batch_size = context.run_config.get(BATCH_SIZE)
            context.node_config["device"] = self._device
            reply = self._load(*payload.about["app"])(message=message, context=context)
            if not isinstance(reply, Message):
                raise TypeError(f"the ClientApp returned {type(reply)}, not a Message")
            if (took := time.monotonic() - began) > (ttl := message.metadata.ttl):
                # Nobody waits for this reply, but the SuperLink would keep it until the run ends.
                raise TimeoutError(
                    f"the reply took {took:.0f} s and is late after {ttl:.0f} s (give the run a "
                    "longer phase-timeout, or this node less to do)"
                )
            del message
            self._replies.put(Payload.of(reply, context).parts())
        except Exception as error:
            log(ERROR, "ClientApp raised an exception", exc_info=error)
            return self._failure(error, batch_size)
        return "done", 0, ""

    def _failure(self, error: Exception, batch_size: object) -> Note:
        kind = "lost" if is_cuda_lost(error) else "failed"
        # The same codes and texts as from Flower's own ClientApp process.
        if isinstance(error, LoadClientAppError):
            reason = "An exception was raised when attempting to load `ClientApp`"
            return kind, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason
        reason = f"{type(error)}:<'{explained(error)}'>"
        if is_out_of_memory(error):
            reason = f"{memory_remedy(self._device, batch_size)}. {reason}"
            if kind == "failed":
                give_memory_back(error)
        return kind, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, shortened(reason)

    def _load(self, name: str, version: str, bundle: str) -> ClientApp:
        if self._app is None:  # for another bundle the executor starts another worker
            folder = folder_of_bundles(get_flwr_home()) / bundle  # the guard has unpacked it
            prefer(folder)
            load = get_load_client_app_fn(default_app_ref="", app_path=str(folder), multi_app=True)
            self._app = load(name, version, bundle)
        return self._app


def _preload(modules: list[str]) -> None:
    gc.disable()  # a tenth of the time of imports
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnfitError(f"preload={module}: it cannot be imported here ({error})") from error
    gc.freeze()
    gc.enable()


def main() -> None:
    """Run the worker; only the executor starts it."""
    parser = argparse.ArgumentParser(prog="flwr_distill.flower.worker", description=main.__doc__)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--place", type=int, default=0)
    for name in ("notes", "tasks", "replies"):
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    args = parser.parse_args()
    notes = Notes.of(args.notes_fd)
    try:
        _preload(args.preload)
        put_off_compiler()
        keep_freed()
        device = take_device(args.device, place=args.place)
    except UnfitError as error:
        notes.send("unfit", 0, shortened(str(error)))
        return
    notes.send("ready", 0, device.name)
    Worker(notes, PayloadFile(args.tasks_fd), PayloadFile(args.replies_fd), device.name).serve()


if __name__ == "__main__":
    main()
