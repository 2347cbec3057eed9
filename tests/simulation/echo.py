"""An app that does as ordered."""

import os
import signal
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


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
    time.sleep(float(orders.get("sleep", 0)))
    said = {"asked": asked, "pid": os.getpid(), "place": context.node_config["place"]}
    return Message(RecordDict({"reply": ConfigRecord(said)}), reply_to=message)
