"""Runs of the real ServerApp and ClientApp, and what an oracle needs to repeat their draws."""

import json

import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

from benchmarks.in_process import FIRST_NODE, run_in_process
from flwr_distill.client.session import Session
from flwr_distill.fleet.run_settings import read_settings
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

SPEC = load_dataset("digits").spec
NET = "tests.oracles.federation:Net"

ROUNDING = 1e-5
"""Relative distance of two models up to which only rounding differs.

The scripts round other than the federation, which averages in another order: after five rounds that
is 3e-7 to 1e-6 of the parameters' length. A wrong sign or factor makes it 1e-3 and more.
"""


class Net(nn.Module):
    """A network of one hidden layer, for 8 x 8 digits.

    It is smooth: a kink, as of ReLU, makes different rounding of a step into another step.
    """

    def __init__(self, spec):
        super().__init__()
        self.hidden = nn.Linear(64, 16)
        self.output = nn.Linear(16, spec.num_classes)

    def forward(self, images):
        return self.output(self.hidden(images.flatten(1)).tanh())


def network():
    """f(w, x), the logits of the network."""
    net = create_model(NET, SPEC, seed=0)
    return lambda w, x: functional_call(net, w, x)


def features(w, x):
    """The inputs of the network's last layer."""
    return (x.flatten(1) @ w["hidden.weight"].T + w["hidden.bias"]).tanh()


class Federation:
    """A run of a paper's preset on a few nodes, made small."""

    def __init__(self, folder, preset, num_nodes, **changes):
        self.folder, self.num_nodes = folder, num_nodes
        own = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
        small = {"dataset": "digits", "model": NET, "num-rounds": 5}
        self.config = read_settings(preset) | small | own

    def run(self, wrap=lambda place, node: node):
        """Run it, with nodes wrapped; the model after the last round."""
        nodes = [{"num-partitions": self.num_nodes}] * self.num_nodes
        run_in_process(self.config, nodes, self.folder, wrap)
        return load_file(self.folder / "1" / "model.safetensors")

    def read(self, name):
        """A JSON file of the run."""
        return json.loads((self.folder / "1" / f"{name}.json").read_text())

    def place(self, name):
        """Index of the node of this name in the run's files."""
        return int(name.removeprefix("node-"))

    @property
    def start(self):
        """The model before the first round: the weights that the seed draws."""
        return create_model(NET, SPEC, self.config.get("seed", 0)).state_dict()

    @property
    def sessions(self):
        """Sessions of the nodes, which have their data and their generators."""
        nodes = [
            {
                "partition-id": i,
                "num-partitions": self.num_nodes,
                "state-dir": str(self.folder / "oracle"),
                "device": "cpu",
            }
            for i in range(self.num_nodes)
        ]
        return [
            Session.of(Context(1, FIRST_NODE + i, node, RecordDict(), self.config))
            for i, node in enumerate(nodes)
        ]


def distance(found, expected):
    """Length of the difference of two models, relative to the length of the second."""
    assert found.keys() == expected.keys()
    both = [
        torch.cat([w[name].detach().flatten().double() for name in expected])
        for w in (found, expected)
    ]
    return float((both[0] - both[1]).norm() / both[1].norm())
