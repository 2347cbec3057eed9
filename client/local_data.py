"""A node's data: its owner's or its share of a set, without samples that may not be used."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_distill.protocol.messages import CLASSES, HOLDOUT, HOLDOUT_SECRET, MIN_OF_A_CLASS
from flwr_distill.task.columns import Moments, Scale
from flwr_distill.task.compute.device import place
from flwr_distill.task.datasets import (
    DataSpec,
    Samples,
    fingerprint_of,
    labels_of,
    load_own_table,
    load_private_data,
    moments_of,
)
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import PRIVATE, data_spec, domain, partition_samples, source_files

MAX_LOADED = 2**26
"""Bytes of samples that a process keeps: those of many virtual nodes, or of one large node."""
GPU_FACTOR = 16
"""Times as many bytes it keeps on a GPU."""
NodeConfigValue = bool | int | float | str


@dataclass(frozen=True)
class LocalData:
    """A node's samples, on its device if they fit there.

    Parameters
    ----------
    spec : DataSpec
        Shape and classes, the same for all nodes.
    train : Samples
        Training samples.
    holdout : Samples
        Evaluation samples, possibly none: the test set of the node's data set, else a share of its
        data, by ``train.holdout`` or by its owner's rule.
    fingerprint : bytes
        Of what was read; see `task.datasets.fingerprint_of`.
    moments : Moments, optional (default: None)
        Of a table's columns. Held-out rows count: else the differences between runs, which hold
        out other rows, would show single ones.
    """

    spec: DataSpec
    train: Samples
    holdout: Samples
    fingerprint: bytes
    moments: Moments | None = None

    @property
    def size(self) -> int:
        """Bytes of the samples; those on a GPU count for one in `GPU_FACTOR`."""
        parts = (self.train, self.holdout)
        tensors = [tensor for part in parts for tensor in (part.inputs, part.labels)]
        return sum(t.nbytes // (GPU_FACTOR if t.is_cuda else 1) for t in tensors)


def generator_of(seed: int, identity: int, purpose: str, server_round: int = 0) -> torch.Generator:
    """A generator on the CPU, for one purpose of one node in one round."""
    words = [seed, identity, zlib.crc32(purpose.encode()), server_round]
    state = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def data_files(
    task: TaskSettings,
    node_config: tuple[tuple[str, NodeConfigValue], ...],
    device: torch.device,
    scale: Scale | None = None,
) -> list[Path]:
    """Files and folders that `local_data` may read, there or not."""
    node = dict(node_config)
    data_root = str(node.get("data-root", ""))
    files = source_files(task, data_root)  # of the spec, where the node has data of its own
    if name := node.get("dataset"):
        return [*files, *source_files(task.model_copy(update={"dataset": str(name)}), data_root)]
    return [*files, Path(str(node["data"]))] if "data" in node else files


@read_once(data_files, maxsize=MAX_LOADED, size=lambda data: data.size)
def local_data(
    task: TaskSettings,
    node_config: tuple[tuple[str, NodeConfigValue], ...],
    device: torch.device,
    scale: Scale | None = None,
) -> LocalData:
    """A node's samples by the run's settings and the node config.

    They are loaded once per process, and again when their files have changed.
    """
    node = dict(node_config)
    data_root = str(node.get("data-root", ""))
    spec = data_spec(task, data_root, scale)
    identity = int(node.get("partition-id", 0))
    if name := node.get("dataset"):
        shares = int(node.get("num-partitions", 0))
        own = domain(task, str(name), (identity, shares) if shares else None, data_root)
        train, test = (place(part.to_samples(spec), device) for part in (own.train, own.test))
        return LocalData(spec, train, test, fingerprint_of(spec, own.train, own.test))
    table = task.private.table if task.dataset == PRIVATE else None
    if path := node.get("data"):
        if table:
            is_scaled = bool(scale) or not table.open_inputs
            raw = load_own_table(str(path), spec, table, is_scaled=is_scaled)
        else:
            raw = load_private_data(str(path), spec)
    elif task.dataset == PRIVATE:
        raise SettingsError(
            'not set, and with dataset = "private" every node brings its own data',
            where="node config: data",
            remedy="start the node with --data FOLDER",
        )
    elif "partition-id" not in node or "num-partitions" not in node:
        raise SettingsError(
            "neither data nor partition-id and num-partitions are set",
            where="node config",
            remedy="start the node with --data FOLDER, or --partition-id I --num-partitions N",
        )
    else:
        raw = partition_samples(task, identity, int(node["num-partitions"]), data_root)
    used = _in_used_classes(torch.tensor(raw.labels), node, spec).nonzero().flatten()
    if HOLDOUT in node:
        is_held_out = _held_out_by_owner(node, len(raw))[used]
        held, rest = used[is_held_out], used[~is_held_out]
    else:
        order = torch.randperm(len(used), generator=generator_of(task.seed, identity, "holdout"))
        num_held_out = int(task.train.holdout * len(used))
        held, rest = used[order[:num_held_out]], used[order[num_held_out:]]
    return LocalData(
        spec=spec,
        train=place(raw.to_samples(spec, rest), device),
        holdout=place(raw.to_samples(spec, held), device),
        fingerprint=fingerprint_of(data_spec(task, data_root), raw),
        moments=moments_of(raw.subset(used.numpy()), table) if table else None,
    )


def _held_out_by_owner(node: Mapping[str, NodeConfigValue], num_samples: int) -> Tensor:
    """Which samples the owner holds out, bool (n,): by place in the data, and a secret of the node.

    A draw depends on its sample's place alone, so no run can have other samples held out.
    """
    secret, below = bytes.fromhex(str(node[HOLDOUT_SECRET])), int(float(node[HOLDOUT]) * 2**64)
    draws = (
        blake2b(place.to_bytes(8, "big"), key=secret, digest_size=8).digest()
        for place in range(num_samples)
    )
    return torch.tensor([int.from_bytes(draw, "big") < below for draw in draws], dtype=torch.bool)


def _in_used_classes(labels: Tensor, node: Mapping[str, NodeConfigValue], spec: DataSpec) -> Tensor:
    """Which samples are of classes that the node's owner lets runs use, bool (n,)."""
    if names := str(node.get(CLASSES, "")):
        rule, path = f"classes = {names}", str(node["data"])
        usable = labels_of(path, names.split(","), spec)
        used = torch.isin(labels, torch.tensor(usable, dtype=torch.int64))
    elif fewest := int(node.get(MIN_OF_A_CLASS, 0)):
        rule, used = f"fewest-of-a-class = {fewest}", labels.bincount()[labels] >= fewest
    else:
        return torch.ones(len(labels), dtype=torch.bool)
    if not used.any():
        raise SettingsError("no sample is of such a class", where=f"the node's policy: {rule}")
    return used
