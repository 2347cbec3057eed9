"""The clients' work: nothing, another sign, a step of training, or an epoch on some digits."""

import time

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the arrays unchanged, or after an epoch of training on digits.

    Unchanged arrays are not sent back: the SuperLink has them. Those with another sign are. Of a
    single step, say how long after the message was made it was done, and what CPU time this
    process has used since its start.
    """
    arrays = message.content.array_records["arrays"]
    metrics = MetricRecord({"num-examples": 1})
    if context.run_config["work"] == "negated":
        arrays = ArrayRecord([-array.numpy() for array in arrays.values()])
    if context.run_config["work"] == "digits":
        arrays, metrics["num-examples"] = _train_on_digits(arrays, context)
    if context.run_config["work"] == "step":
        _take_a_step()
        metrics["seconds"] = time.time() - message.metadata.created_at
        metrics["cpu-seconds"] = time.process_time()
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _train_on_digits(arrays: ArrayRecord, context: Context) -> tuple[ArrayRecord, int]:
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional

    from rounds_app.model import build_model

    node = context.node_config
    name = str(node["device"])
    part = slice(int(node["partition-id"]), None, int(node["num-partitions"]))
    digits = load_digits()
    images = torch.tensor(digits.images[part], dtype=torch.float32, device=name).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[part], device=name)
    model = build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.to(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(0, len(labels), 32):
        batch = slice(start, start + 32)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return ArrayRecord(model.cpu().state_dict()), len(labels)


def _take_a_step() -> None:
    import torch
    from torch.nn import functional

    from rounds_app.model import build_model

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = functional.cross_entropy(model(torch.rand(32, 1, 8, 8)), torch.arange(32) % 10)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
