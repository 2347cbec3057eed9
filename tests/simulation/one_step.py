"""An app whose nodes take a step of an optimiser."""

import sys

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def step(message, context):
    """Whether PyTorch's compiler was imported for it."""
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1).step()
    compiler = "torch._dynamo.eval_frame" in sys.modules
    return Message(RecordDict({"reply": ConfigRecord({"compiler": compiler})}), reply_to=message)
