"""Model and data of the app."""

import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A small network for grey images of 8x8 pixels, to logits of ten digits."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        """Map images to logits."""
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1)
        return self.out(torch.relu(self.hidden(x)))


def for_spec(spec):
    """Make the model for flwr-distill's own ClientApp, which says what the data are like."""
    return Net()


def load_data(context: Context):
    """Training and test samples of a node, which has few of the ten digits."""
    node, nodes = (context.node_config[key] for key in ("partition-id", "num-partitions"))
    images, labels = digits("nodes")
    own = labels * nodes // 10 == node
    images, labels = images[own], labels[own]
    test = len(labels) // 5
    return TensorDataset(images[test:], labels[test:]), TensorDataset(images[:test], labels[:test])


def digits(whose):
    """Images of all ``nodes`` or the ``server``, (n, 1, 8, 8) from -1 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[400:] if whose == "nodes" else order[:400]
    return images[part], torch.tensor(labels)[part]


def accuracy(model, images, labels):
    """Share of the images that the model gets right."""
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).float().mean())
