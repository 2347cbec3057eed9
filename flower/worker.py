"""The warm child of a node: torch, the app, its data and its CUDA context, kept between messages.

Started by the executor. It exchanges payloads with the SuperNode, and only notes (`node.notes`)
with the executor. Of our package it imports only `flower` and `node`, before the app, which cannot
replace them; everything else comes from the app bundle.
"""

from __future__ import annotations

import argparse
import base64
import gc
import importlib
import time
from contextlib import suppress
from logging import ERROR
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common import log
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, fab_from_proto, run_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.run import Run
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.overrides import patch_pull_backoff
from flwr_distill.node.bundle import folder_of_bundles, prefer, unpack
from flwr_distill.node.compiler import put_off_compiler
from flwr_distill.node.device import UnfitError, take_device
from flwr_distill.node.gpus import give_memory_back, is_cuda_lost, is_out_of_memory, memory_remedy
from flwr_distill.node.kernel import keep_freed, trim_heap
from flwr_distill.node.notes import TASK_LIMIT, Notes, shortened

appio: Any = module_of_line("node", "appio")
Note = tuple[str, int, str]
"""``ready`` (with the device), ``unfit``, ``failed``, ``lost`` (failed, and this process is
unusable), ``pushing`` or ``done``; an error code; a reason."""

BATCH_SIZE = "train.batch-size"
"""The run-config key that an error names when a GPU's memory does not suffice."""


class Worker:
    """Runs one app bundle's ClientApp on a device; `api` is an `AppIo` of the installed line."""

    def __init__(self, api: Any, notes: Notes, device: str) -> None:
        self._api = api
        self._notes = notes
        self._device = device
        self._app: ClientApp | None = None

    def serve(self) -> None:
        """Serve tasks until the executor ends, or CUDA fails for good."""
        while True:
            try:
                token, tree = self._notes.receive()
            except EOFError:
                return
            note = self._serve_task(token, ObjectTree.FromString(base64.b64decode(tree)))
            self._notes.send(*note)
            if note[0] == "lost":
                return
            trim_heap()

    def _serve_task(self, token: str, tree: ObjectTree) -> Note:
        """Serve a task; return the last note."""
        calls = self._api.calls(token)
        began = time.monotonic()
        batch_size: object = None
        try:
            message, context, run, fab = _pull(calls, tree)
            batch_size = context.run_config.get(BATCH_SIZE)
            context.node_config["device"] = self._device
            reply = self._load(run, fab)(message=message, context=context)
            if not isinstance(reply, Message):
                raise TypeError(f"the ClientApp returned {type(reply)}, not a Message")
            if (took := time.monotonic() - began) > (ttl := message.metadata.ttl):
                # Nobody waits for this reply, but the SuperLink would keep it until the run ends.
                raise TimeoutError(f"the reply took {took:.0f} s and is late after {ttl:.0f} s")
        except Exception as error:
            log(ERROR, "ClientApp raised an exception", exc_info=error)
            return self._failure(error, batch_size)
        self._notes.send("pushing", 0, "")
        # If the SuperLink has some of the objects already, the SuperNode may send the reply and
        # delete it before the others arrive here.
        with suppress(appio.TOO_LATE):
            push_message(calls, reply, context)
        push_task_output(calls, context=context, sub_status=SubStatus.COMPLETED, details="")
        return "done", 0, ""

    def _failure(self, error: Exception, batch_size: object) -> Note:
        kind = "lost" if is_cuda_lost(error) else "failed"
        # The same codes and texts as from Flower's own ClientApp process.
        if isinstance(error, LoadClientAppError):
            reason = "An exception was raised when attempting to load `ClientApp`"
            return kind, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason
        reason = f"{type(error)}:<'{error}'>"
        if is_out_of_memory(error):
            reason = f"{memory_remedy(self._device, batch_size)}. {reason}"
            if kind == "failed":
                give_memory_back(error)
        return kind, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, shortened(reason)

    def _load(self, run: Run, fab: Fab) -> ClientApp:
        if self._app is None:  # for another bundle the executor starts another worker
            # In a sandbox it is already unpacked, and read-only.
            folder = unpack(fab.content, folder_of_bundles(get_flwr_home()))
            prefer(folder)
            load = get_load_client_app_fn(default_app_ref="", app_path=str(folder), multi_app=True)
            self._app = load(run.fab_id, run.fab_version, fab.hash_str)
        return self._app


def _pull(calls: Any, tree: ObjectTree) -> tuple[Message, Context, Run, Fab]:
    task = appio.pull_task_input(calls)
    context = context_from_proto(task.context)
    node, run_id = Node(node_id=context.node_id), context.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(calls.PullObject, node, run_id),
        make_confirm_message_received_fn_protobuf(calls.ConfirmMessageReceived, node, run_id),
        return_type=Message,
    )
    # An inflated message has no id of its own, which replies need.
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message, context, run_from_proto(task.run), fab_from_proto(task.fab)


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
    parser.add_argument("--appio-address", required=True)
    parser.add_argument("--root-certificates", type=Path)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--place", type=int, default=0)
    parser.add_argument("--notes-fd", type=int, required=True)
    args = parser.parse_args()
    notes = Notes.of(args.notes_fd, TASK_LIMIT)
    certificates = args.root_certificates
    api = appio.AppIo(args.appio_address, certificates and certificates.read_bytes())
    patch_pull_backoff()
    try:
        _preload(args.preload)
        put_off_compiler()
        keep_freed()
        device = take_device(args.device, place=args.place)
    except UnfitError as error:
        notes.send("unfit", 0, shortened(str(error)))
        return
    notes.send("ready", 0, device.name)
    Worker(api, notes, device.name).serve()


if __name__ == "__main__":
    main()
