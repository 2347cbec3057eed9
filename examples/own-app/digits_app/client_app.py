"""The app's own ClientApp, and HFLDD's handlers in it."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from digits_app.task import Net, accuracy, load_data
from flwr_distill.client.handlers import add_methods

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as Flower's FedAvg asks; HFLDD's heads train by their own message."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples, _ = load_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for images, labels in DataLoader(samples, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train-loss": loss.item(), "num-examples": len(samples)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the node's test samples."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, samples = load_data(context)
    share = accuracy(model, *samples.tensors)
    metrics = MetricRecord({"own-accuracy": share, "num-examples": len(samples)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


add_methods(app, "hfldd", model=Net, data=load_data)
