"""The head in closed form of all nodes' samples in one place, and splits of them among nodes."""

import json

import numpy as np
from flwr.app import Context, RecordDict

from flwr_distill.client.features import kept_features
from flwr_distill.client.session import Session
from flwr_distill.distill.analytic import Sums, best_penalty, clipped, ridge

MODEL = {"model": "random-features"}
SPLITS = {
    "one class a node": {"partition.classes": 1},
    "iid": {"partition.scheme": "iid"},
    "dirichlet 0.01": {"partition.scheme": "dirichlet", "partition.alpha": 0.01},
    "12 to 1,200 samples": {
        "partition.scheme": "index-file",
        "train.holdout": 0.0,
        "most-samples": 0.0,
    },
}
SIZES = (12, 1200, 128, 60)
"""Samples of the first nodes, where a split is by size."""


def split(name, num_nodes, folder):
    """Run config of a split; that by size has a file in the folder."""
    config = {**MODEL, **SPLITS[name]}
    if config.get("partition.scheme") != "index-file":
        return config
    parts, start = {}, 0
    for node, size in enumerate(SIZES[:num_nodes]):
        parts[str(node)] = list(range(start, start + size))
        start += size
    (folder / "sizes.json").write_text(json.dumps(parts))
    return {**config, "partition.index-file": str(folder / "sizes.json")}


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
