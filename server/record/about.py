"""What a run is, apart from its settings: when, with which nodes, data and versions."""

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from server.roster import Roster
from task.datasets import DataSpec
from task.partition import PartitionError
from task.settings import TaskSettings
from task.source import PRIVATE, partition_samples

PACKAGES = ("flwr-distill", "flwr", "torch", "torchvision", "numpy", "scikit-learn")


def about_run(spec: DataSpec, roster: Roster, started: str) -> dict[str, Any]:
    """Content of ``about.json``.

    Parameters
    ----------
    spec : DataSpec
        What the model fits; with it, the model can be built without the data.
    roster : Roster
        The nodes that the run has met.
    started : str
        When it began, in ISO 8601.
    """
    return {
        "started": started,
        "spec": asdict(spec),
        "nodes": {
            str(node): {"name": name, "samples": roster.num_examples.get(node)}
            for node, name in roster.names.items()
        },
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
    }


def class_counts(
    settings: TaskSettings, spec: DataSpec, roster: Roster
) -> dict[str, list[int]] | None:
    """Samples of each class on each node, worked out from the settings alone.

    Nodes are not asked: how many samples of a class they hold is private. A named data set is
    split by the settings, which are no secret; so what they say of it gives nothing away.

    Parameters
    ----------
    settings : TaskSettings
        Name the data set and its partition.
    spec : DataSpec
        Of that data set.
    roster : Roster
        The nodes, with as many training samples as they said.

    Returns
    -------
    dict[str, list[int]] or None
        By the nodes' names; None where nodes bring data of their own, are not numbered from 0 on,
        or hold other numbers of samples than the settings give them.
    """
    names = list(roster.names.values())
    if settings.dataset == PRIVATE or names != [str(i) for i in range(len(names))]:
        return None
    counts = {}
    for partition, (node, name) in enumerate(roster.names.items()):
        try:
            labels = partition_samples(settings, partition, len(names)).labels
        except PartitionError:
            return None
        if roster.num_examples.get(node) != len(labels) - int(settings.train.holdout * len(labels)):
            return None
        counts[name] = np.bincount(labels, minlength=spec.num_classes).tolist()
    return counts


def _version(package: str) -> str:
    """Installed version; the app itself may run from a bundle without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
