"""An app that does as ordered."""

import os
import resource
import signal
import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
IMPORTED_BY = os.getpid()


@app.query()
def echo(message, context):
    """How often the node was asked, by which process it answers, and where the node is."""
    orders = message.content.config_records.get("orders", ConfigRecord())
    asked = int(context.state.config_records.get("asked", {}).get("n", 0)) + 1
    context.state["asked"] = ConfigRecord({"n": asked})
    if orders.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if orders.get("raise"):
        raise ValueError("as ordered")
    if orders.get("refuse"):
        return Message(Error(77, "as ordered"), reply_to=message)
    if orders.get("fork") and os.fork() == 0:
        if orders["fork"] == "and answer":
            raise ValueError("a fork's answer")
        time.sleep(600)
    if orders.get("fork") == "and die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how := orders.get("fail-while-writing"):
        model = ArrayRecord({"weight": Array(np.zeros(1000))})
        content = {"model": model, "last": Unwritable(how)}
        return Message(RecordDict(content), reply_to=message)
    if orders.get("forget"):
        context.state.clear()
    time.sleep(float(orders.get("sleep", 0)))
    said = {
        "asked": asked,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported-by": IMPORTED_BY,
        "place": context.node_config["place"],
        "path": sys.path,
        "faults": faults_of_freed_memory() if orders.get("allocate") else 0,
    }
    return Message(RecordDict({"reply": ConfigRecord(said)}), reply_to=message)


class Unwritable(ArrayRecord):
    """Arrays on which a worker that writes them fails."""

    def __init__(self, how):
        super().__init__()
        self._how = how

    def items(self):
        """Die, or raise."""
        if self._how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("as ordered")


def faults_of_freed_memory():
    """Page faults while blocks of 40 MB are allocated and freed, after the first time."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            bytearray(40_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
