"""What a run says of itself apart from its settings."""

import json

import numpy as np
import pytest

from flwr_distill.server.record.about import about_run, class_counts
from flwr_distill.server.roster import Roster
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.directory import Description, Directory
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.source import data_spec, partition_samples

NODES = 4


def settings(**run_config):
    return RunSettings.from_run_config(
        {key.replace("__", ".").replace("_", "-"): v for key, v in run_config.items()}
    )


def roster(sizes):
    ids = [2**64 - 10 + i for i in range(len(sizes))]
    nodes = {node: Description(sizes[i], partition=i) for i, node in enumerate(ids)}
    directory = Directory()
    directory.names |= {node: f"node-{i}" for i, node in enumerate(ids)}
    return Roster(directory, nodes=nodes)


def sizes(run, holdout):
    held = [len(partition_samples(run, i, NODES)) for i in range(NODES)]
    return [n - int(holdout * n) for n in held]


@pytest.mark.parametrize("holdout", [0.0, 0.1])
def test_class_counts_are_those_of_the_partition(holdout):
    run = settings(partition__scheme="dirichlet", partition__alpha=0.3, train__holdout=holdout)
    counts = class_counts(run, data_spec(run), roster(sizes(run, holdout)))
    for i in range(NODES):
        labels = partition_samples(run, i, NODES).labels
        assert counts[f"node-{i}"] == [int(np.sum(labels == c)) for c in range(10)]


def test_class_counts_are_not_told_where_nodes_hold_something_else():
    run = settings(train__holdout=0.1)
    fitting = sizes(run, 0.1)
    assert class_counts(run, data_spec(run), roster(fitting)) is not None
    assert class_counts(run, data_spec(run), roster([*fitting[:-1], fitting[-1] + 1])) is None


def test_class_counts_are_not_told_of_nodes_own_data_nor_of_nodes_without_partition():
    private = settings(dataset="private")
    assert class_counts(private, data_spec(private), roster([5, 5])) is None
    run = settings()
    strangers = Roster(nodes={7: Description(700), 9: Description(700)})
    assert class_counts(run, data_spec(run), strangers) is None


def test_the_data_spec_comes_back_from_json():
    spec = DataSpec("x", (3, 4, 5), 7, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    about = json.loads(json.dumps(about_run(spec, roster([5]), "2026-11-21")))
    assert about["spec"]["shape"] == [3, 4, 5]
    said = {"version": "", "device": ""}
    assert about["nodes"] == {
        str(2**64 - 10): dict(name="node-0", samples=5, fingerprint="", **said)
    }
    assert {"python", "flwr", "torch"} <= about["versions"].keys()
