"""Rounds of strategies in memory: a model of digits, Flower's loop, and spoiled replies."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from benchmarks.in_process import FIRST_NODE
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

FIRST = FIRST_NODE
SPEC = load_dataset("digits").spec
MODEL = create_model("auto", SPEC, seed=0)


def start():
    """The model before the first round."""
    return ArrayRecord(MODEL.state_dict())


def play(strategy, grid, server_round=1, arrays=None):
    """One round, as Flower's loop does it; the model after it."""
    arrays, config = start() if arrays is None else arrays, ConfigRecord({"lr": 0.05})
    messages = strategy.configure_train(server_round, arrays, config, grid)
    return strategy.aggregate_train(server_round, grid.send_and_receive(messages))[0]


def first_clusters(strategy, grid):
    """Sectors and leaders that the first round will have."""
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    return strategy.topology.clusters


def numbers(arrays):
    """A record or a model's state as NumPy arrays."""
    return {
        name: array if isinstance(array, np.ndarray) else array.numpy()
        for name, array in arrays.items()
    }


def assert_equal(found, expected, atol=1e-6):
    found, expected = numbers(found), numbers(expected)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=atol, err_msg=name)


def spoil(grid, node, change, *types):
    """Have a node's replies to messages of these types, or to all, changed in place."""
    answer = grid.nodes[node]

    def spoiled(message):
        content = answer(message)
        if not types or message.metadata.message_type in types:
            change(content)
        return content

    grid.nodes[node] = spoiled
