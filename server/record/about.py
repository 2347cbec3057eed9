"""Describes a run apart from its settings: start, nodes, data, versions."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from flwr_distill.server.roster import Roster
from flwr_distill.strategies.common.directory import Description
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.partition import PartitionError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import PRIVATE, partition_samples

FILE = "about.json"
PACKAGES = ("flwr-distill", "flwr", "torch", "torchvision", "numpy", "scikit-learn")


def about_run(
    spec: DataSpec,
    roster: Roster,
    started: str,
    fingerprint: str = "",
    earlier: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Content of ``about.json``; with `spec`, the model can be built without the data.

    `fingerprint` is of the server's data set; nodes key their own. Unnamed classes are called by
    their positions. `earlier` are names by ids that nodes no longer have; see `earlier_names`.
    """
    gone = {node: name for node, name in (earlier or {}).items() if int(node) not in roster.nodes}
    names = roster.directory.class_names or spec.class_names
    labels = replace(spec.labels, classes=names)
    return {
        "started": started,
        "spec": asdict(replace(spec, labels=labels)),
        "labels": labels.digest,
        "fingerprint": fingerprint,
        "nodes": {
            str(node): _about_node(name, roster.nodes[node]) for node, name in roster.names.items()
        },
        **({"earlier": gone} if gone else {}),
        "warnings": roster.warnings,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
    }


def earlier_names(folder: Path) -> dict[str, str]:
    """Names of nodes by the ids that they had before a run was resumed, which its journal has.

    Empty where the file is missing or damaged.
    """
    try:
        about = json.loads((folder / FILE).read_text(encoding="utf-8"))
        own = {node: entry["name"] for node, entry in about["nodes"].items()}
        names = {**about.get("earlier", {}), **own}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {node: str(name) for node, name in names.items() if node.isdecimal()}


def class_counts(
    settings: TaskSettings, spec: DataSpec, roster: Roster
) -> dict[str, list[int]] | None:
    """Samples of each class by node name, computed from the settings alone.

    How many samples of a class a node holds is private, so nodes are not asked. The settings of a
    named data set are public anyway. None if nodes bring their own data, are not numbered from 0,
    or hold other numbers of samples than the settings give them.
    """
    nodes = list(roster.nodes.values())
    if settings.dataset == PRIVATE or any(
        about.dataset or about.partition != i for i, about in enumerate(nodes)
    ):
        return None
    counts = {}
    for partition, (about, name) in enumerate(zip(nodes, roster.names.values(), strict=True)):
        try:
            labels = partition_samples(settings, partition, len(nodes)).labels
        except PartitionError:
            return None
        if about.num_examples != len(labels) - int(settings.train.holdout * len(labels)):
            return None
        counts[name] = np.bincount(labels, minlength=spec.num_classes).tolist()
    return counts


def _about_node(name: str, node: Description) -> dict[str, Any]:
    return {"name": name, **node.read, "version": node.version, "device": node.device}


@cache
def _version(package: str) -> str:
    """Installed version; the app itself may run from a bundle without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
