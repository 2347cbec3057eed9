"""The head in closed form of all nodes' samples in one place."""

import numpy as np
from flwr.app import Context, RecordDict

from client.features import kept_features
from client.session import Session
from distill.analytic import Sums, best_penalty, clipped, ridge


def head_of_all(config, num_nodes, folder):
    """Of the nodes of a run with this config; their files are in a folder."""
    nodes = [
        Session.of(
            Context(
                1,
                place,
                {"partition-id": place, "num-partitions": num_nodes, "state-dir": str(folder)},
                RecordDict(),
                config,
            )
        )
        for place in range(num_nodes)
    ]
    features = np.concatenate([kept_features(node, node.data.train.inputs) for node in nodes])
    labels = np.concatenate([node.data.train.labels for node in nodes])
    sums = Sums.of(clipped(features, 1.0), labels, nodes[0].data.spec.num_classes)
    return ridge(sums, best_penalty(sums))
