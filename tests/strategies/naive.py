"""Local training and class means as plain loops, for oracles of methods that share class means."""

import copy

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.training import epoch_batches

LR = 0.05
UNEQUAL = {
    "partition.scheme": "pareto",
    "partition.classes": 4,
    "partition.alpha": 3.0,
    "train.batch-size": 64,
}
"""Run config of nodes of unequal size, with 4 classes each."""


def sessions(run_config, folder, num_nodes):
    """Sessions of nodes with a store of their own, apart from the grid's."""
    nodes = [
        {"partition-id": i, "num-partitions": num_nodes, "state-dir": str(folder / "naive")}
        for i in range(num_nodes)
    ]
    return [
        Session.of(Context(99, i, node, RecordDict(), run_config)) for i, node in enumerate(nodes)
    ]


def trained(session, model, server_round, extra=lambda model, x, y: 0.0, epochs=1):
    """A copy of the model after plain SGD on the cross-entropy plus an extra loss."""
    model, data = copy.deepcopy(model).train(), session.data.train
    draws = session.generator("train", server_round)
    for _ in range(epochs):
        for batch in epoch_batches(data.labels, session.task.train.batch_size, draws):
            x, y = data.inputs[batch], data.labels[batch]
            loss = functional.cross_entropy(model(x), y) + extra(model, x, y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), gradients, strict=True):
                    weight -= LR * gradient
    return model.eval()


def by_class(values, labels):
    """Mean of the values (n, d) of each class, and its samples."""
    held = sorted(set(labels.tolist()))
    return {c: (values[labels == c].double().mean(0), int((labels == c).sum())) for c in held}


def mean_over_nodes(of_nodes):
    """Mean of nodes' class means, weighted by their samples of the class."""
    classes = sorted({c for of_node in of_nodes for c in of_node})
    means = {}
    for c in classes:
        held = [of_node[c] for of_node in of_nodes if c in of_node]
        means[c] = sum(n * mean for mean, n in held) / sum(n for _, n in held)
    return means


def play(strategy, grid, server_round, arrays, **config):
    """One round, as Flower's loop does it; the arrays after it."""
    told = ConfigRecord({"lr": LR, "local-epochs": 1, **config})
    messages = strategy.configure_train(server_round, arrays, told, grid)
    after, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    return arrays if after is None else after


def start(model):
    return ArrayRecord(model.state_dict())


def assert_by_class(found, expected, atol=1e-5):
    assert sorted(found) == sorted(expected)
    for c, value in expected.items():
        torch.testing.assert_close(
            torch.from_numpy(found[c].copy()).double(), value.double(), atol=atol, rtol=0
        )
