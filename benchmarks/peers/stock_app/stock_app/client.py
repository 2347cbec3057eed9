"""Trains one epoch."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.peers.work import SAMPLES, Work, network, samples, train_epoch

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on this client's samples."""
    work = Work.of_this_process()
    model = network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    steps = train_epoch(model, *samples(work.clients, client))
    metrics = MetricRecord({"num-examples": SAMPLES, "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
