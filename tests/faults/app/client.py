"""Our ClientApp, which takes the fault that waits for the phase and round that it is in.

Faults wait as files ``<message type>.<round>`` with a fault's name. The first node that comes there
takes it: it renames the file to ``<message type>.<round>.<node id>``. Where nodes have leaders, the
first leader does.
"""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from torch.optim.optimizer import register_optimizer_step_post_hook

import flwr_distill.strategies.fedhead.client
from flwr_distill.client.app import app as ours
from flwr_distill.protocol.messages import ARRAYS, CONFIG, SERVER_ROUND
from flwr_distill.strategies.fedhead.method import LEADS

from .memory import allocate

FOLDER = Path(os.environ["FAULTS"])


class Faulty(ClientApp):
    """Serves messages as our ClientApp does, but for faults."""

    def __call__(self, message, context):
        fault = _taken(message, context)
        return FAULTS[fault](message, context) if fault else ours(message, context)


def _taken(message, context):
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    waiting = FOLDER / f"{message.metadata.message_type}.{config.get(SERVER_ROUND, 0)}"
    if not config.get(LEADS, True):
        return None
    taken = waiting.with_name(f"{waiting.name}.{context.node_id}")
    with suppress(FileNotFoundError):
        waiting.rename(taken)
        return taken.read_text()
    return None


def _parts(context):
    """Processes of this node but for this one; its SuperNode first, lest it takes its leave."""
    status = json.loads((Path(context.node_config["state-dir"]) / "node.json").read_text())
    return [status[part] for part in ("supernode", "executor", "mailbox", "pid") if part in status]


def _signal_all(context, number):
    for pid in _parts(context):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    os.kill(os.getpid(), number)


@contextmanager
def _at_the_first_step(action):
    """Do something in the midst of training."""
    handle = register_optimizer_step_post_hook(lambda *_: (handle.remove(), action()))
    try:
        yield
    finally:
        handle.remove()


def dies_before_work(message, context):
    _signal_all(context, signal.SIGKILL)


def dies_during_work(message, context):
    with _at_the_first_step(lambda: _signal_all(context, signal.SIGKILL)):
        return ours(message, context)


def dies_after_work(message, context):
    ours(message, context)
    _signal_all(context, signal.SIGKILL)


def child_dies(message, context):
    with _at_the_first_step(lambda: os.kill(os.getpid(), signal.SIGKILL)):
        return ours(message, context)


def out_of_memory(message, context):
    with _at_the_first_step(allocate):
        return ours(message, context)


def is_late(message, context):
    with _at_the_first_step(lambda: _signal_all(context, signal.SIGSTOP)):
        return ours(message, context)


def _sends(spoil):
    """Answer with another model, in the reply, in a parcel and in a leader's store alike."""

    def answered(message, context):
        arrays_of = flwr_distill.strategies.fedhead.client.arrays_of

        def spoiled(model):
            return {name: spoil(array) for name, array in arrays_of(model).items()}

        with patch.object(flwr_distill.strategies.fedhead.client, "arrays_of", spoiled):
            reply = ours(message, context)
        if sent := reply.content.array_records.get(ARRAYS):
            arrays = {name: Array(spoil(array.numpy())) for name, array in sent.items()}
            reply.content[ARRAYS] = ArrayRecord(arrays)
        return reply

    return answered


def _with_nan(array):
    return np.full_like(array, np.nan) if array.dtype.kind == "f" else array


def _of_another_shape(array):
    return np.concatenate([array, array]) if array.ndim else array


def disk_is_full(message, context):
    ballast = Path(context.node_config["state-dir"]) / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
        return ours(message, context)
    finally:
        ballast.unlink()


def link_is_cut(message, context):
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    return ours(message, context)


def slow(message, context):
    """Over the 15 s of a phase, but within what a node waits for its app."""
    with _at_the_first_step(lambda: time.sleep(20.0)):
        return ours(message, context)


def data_gone(message, context):
    data = Path(context.node_config["data"])
    data.rename(data.with_name("gone"))
    return ours(message, context)


def server_dies(message, context):
    """The test does it, as soon as it sees that the fault was taken."""
    time.sleep(1.0)
    return ours(message, context)


FAULTS = {
    "NODE_DIES_BEFORE_WORK": dies_before_work,
    "NODE_DIES_DURING_WORK": dies_during_work,
    "MEMBER_DIES_DISTILLING": dies_during_work,
    "NODE_DIES_AFTER_WORK": dies_after_work,
    "LEADER_DIES_AVERAGING": dies_before_work,
    "LEADER_DIES_DISTILLING": dies_during_work,
    "EXECUTOR_CHILD_DIES": child_dies,
    "OUT_OF_MEMORY": out_of_memory,
    "REPLY_LATE": is_late,
    "NAN_UPDATE": _sends(_with_nan),
    "WRONG_SHAPE": _sends(_of_another_shape),
    "SLOW": slow,
    "DISK_FULL": disk_is_full,
    "DATA_GONE": data_gone,
    "LINK_CUT_AND_HEALED": link_is_cut,
    "SUPERLINK_RESTARTS": server_dies,
    "SERVERAPP_DIES": server_dies,
}

app = Faulty()
