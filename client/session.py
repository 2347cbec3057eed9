"""What a message handler works with: the run's settings, the node's data, device and store."""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from logging import INFO
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.common import log
from pydantic import TypeAdapter
from torch import Tensor, nn

from flwr_distill.links.store import NodeStore
from flwr_distill.protocol.messages import (
    CLASSES,
    FEWEST_OF_A_CLASS,
    FILE,
    HOLDOUT,
    HOLDOUT_SECRET,
    REAL_PER_VIRTUAL,
)
from flwr_distill.task.auxiliary_names import OWN_FILE
from flwr_distill.task.columns import Moments, Scale
from flwr_distill.task.compute.device import choose_device, place
from flwr_distill.task.datasets import (
    DataSpec,
    Samples,
    fingerprint_of,
    labels_of,
    load_own_table,
    load_private_data,
    moments_of,
)
from flwr_distill.task.file_state import FilesChangedError, read_once
from flwr_distill.task.models import model_of
from flwr_distill.task.settings import SettingsError, TaskSettings
from flwr_distill.task.source import (
    PRIVATE,
    data_spec,
    domain,
    open_columns,
    partition_samples,
    source_files,
)

NodeConfigValue = bool | int | float | str
SCALE = "column-scale"
"""Blob with the run's means and deviations of a table's columns."""
SCALE_BYTES = 100
"""More than a mean and a deviation take in it."""


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
        Evaluation samples: the test set of the node's own data set, else a share of its data,
        possibly empty: ``train.holdout`` and the run's draw, or what the node's owner has fixed.
    fingerprint : bytes
        Of what was read; see `task.datasets.fingerprint_of`.
    moments : Moments, optional (default: None)
        Of a table's columns. Held-out rows count, lest runs that hold out other ones show single
        rows by the differences.
    """

    spec: DataSpec
    train: Samples
    holdout: Samples
    fingerprint: bytes
    moments: Moments | None = None


class Source(Protocol):
    """Where a node's settings, data and model come from."""

    def __hash__(self) -> int:
        """It is part of the keys of caches."""

    def task(self, context: Context) -> TaskSettings:
        """The run's task."""

    def spec(self, context: Context, task: TaskSettings) -> DataSpec:
        """Shape and classes of the samples."""

    def data(
        self, context: Context, task: TaskSettings, device: torch.device, *, scaled: bool = True
    ) -> LocalData:
        """The node's samples, checked to be those with which the run began; see `Session.of`."""

    def model(self, task: TaskSettings, spec: DataSpec, seed: int | None = None) -> nn.Module:
        """A new model on the CPU; without a `seed`, that of the run draws its weights."""


class SourcedContext(Context):
    """Flower's context of a node whose model and data come from a `Source` of its own."""

    def __init__(self, context: Context, source: Source) -> None:
        self.__dict__.update(context.__dict__)
        self.source = source


@dataclass(frozen=True)
class Session:
    """A node in a run, as handlers see it.

    Parameters
    ----------
    task : TaskSettings
        Checked settings of the run.
    data : LocalData
        The node's data, loaded once per process, and again when their files have changed.
    device : torch.device
        Where the node computes.
    store : NodeStore
        The node's files for this run.
    identity : int
        The node's ``partition-id``, else its Flower node id; seeds its random draws.
    run_id, node_id : int
        Flower's ids.
    node_config : Mapping[str, bool | int | float | str]
        Flower's node config.
    source : Source
        Where task, data and models come from.
    """

    task: TaskSettings
    data: LocalData
    device: torch.device
    store: NodeStore
    identity: int
    run_id: int
    node_id: int
    node_config: Mapping[str, NodeConfigValue]
    source: Source

    @classmethod
    def of(cls, context: Context, *, scaled: bool = True) -> "Session":
        """Session of the node that Flower's context describes.

        With ``scaled=False`` a table is not standardised if the run's scale is not yet known.

        Reads ``device``, ``state-dir`` and ``partition-id`` from the node config, and what its
        source reads there.

        Raises
        ------
        SettingsError
            If a setting is wrong, the node has neither ``data`` nor a partition, or it does not
            know the run's scale.
        FilesChangedError
            If the data are no longer those with which this run began on this node.
        """
        node = dict(context.node_config)
        source = source_of(context)
        task = source.task(context)
        device = device_of(context)
        data = source.data(context, task, device, scaled=scaled)
        return cls(
            task=task,
            data=data,
            device=device,
            store=store_of(context),
            identity=int(node.get("partition-id", context.node_id)),
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=node,
            source=source,
        )

    def in_round(self, server_round: int) -> "Session":
        """The same session, with the store of a round."""
        return replace(self, store=self.store.at(server_round))

    def generator(self, purpose: str, server_round: int = 0) -> torch.Generator:
        """CPU generator seeded by the run's seed, the node, the purpose and the round."""
        return _generator(self.task.seed, self.identity, purpose, server_round)

    def new_model(self, seed: int | None = None) -> nn.Module:
        """Model with new weights, on the CPU; without a `seed`, that of the run draws them."""
        return self.source.model(self.task, self.data.spec, seed)


@dataclass(frozen=True)
class RunSource:
    """Model and data as the run's settings and the node config name them.

    Reads ``data``, ``dataset``, ``data-root``, ``partition-id``, ``num-partitions``, ``holdout``
    and ``holdout-secret`` from the node config.
    """

    def task(self, context: Context) -> TaskSettings:
        """The run's task, with the owner's files in place of the names that it gives (``@NAME``).

        Raises
        ------
        SettingsError
            If a setting is wrong, or the owner has no file of a name.
        """
        task = TaskSettings.from_run_config(context.run_config)
        weights = own_file(context.node_config, task.backbone.weights)
        index_file = own_file(context.node_config, task.partition.index_file)
        return task.model_copy(
            update={
                "backbone": task.backbone.model_copy(update={"weights": weights}),
                "partition": task.partition.model_copy(update={"index_file": index_file}),
            }
        )

    def spec(self, context: Context, task: TaskSettings) -> DataSpec:
        """Shape and classes of the samples; the run knows them without the node's data."""
        return data_spec(task, str(context.node_config.get("data-root", "")))

    def data(
        self, context: Context, task: TaskSettings, device: torch.device, *, scaled: bool = True
    ) -> LocalData:
        """The node's samples, loaded once per process, and again when their files have changed."""
        store = store_of(context)
        scale = scale_of(store, task)
        if scaled and scale is None and open_columns(task):
            raise SettingsError(
                "this node does not know the means and deviations of the run's columns: its state "
                "directory is not that of the first meeting (start the run again)"
            )
        config = tuple(sorted(context.node_config.items()))
        data = _local_data(task, config, device, scale)
        files = _data_files(task, config, device, scale)
        check_unchanged(store, data_name(context), data.fingerprint, files)
        return data

    def model(self, task: TaskSettings, spec: DataSpec, seed: int | None = None) -> nn.Module:
        """The run's model; see `task.models.model_of`."""
        return model_of(task, spec, seed)


def source_of(context: Context) -> Source:
    """Where the model and the data of a node come from."""
    return context.source if isinstance(context, SourcedContext) else RunSource()


def device_of(context: Context) -> torch.device:
    """Where the node computes."""
    return choose_device(str(context.node_config.get("device", "auto")), "node config: device")


def store_of(context: Context) -> NodeStore:
    """The node's files for the run."""
    state_dir = str(context.node_config.get("state-dir", "")) or None
    return NodeStore.open(state_dir, context.run_id, context.node_id)


def data_name(context: Context) -> str:
    """Name under which `check_unchanged` keeps the fingerprint of a node's data."""
    partition = context.node_config.get("partition-id")
    return "data" if partition is None else f"data-{partition}"


def scale_of(store: NodeStore, task: TaskSettings) -> Scale | None:
    """What a table's columns are standardised by in the run, if this node knows it."""
    if not (names := open_columns(task)):
        return None
    text = store.at(None).read(SCALE, most=SCALE_BYTES * len(names))
    return None if text is None else TypeAdapter(Scale).validate_json(text)


def keep_scale(store: NodeStore, scale: Scale) -> None:
    """Keep what a table's columns are standardised by, for the rest of the run."""
    store.at(None).write(SCALE, json.dumps(asdict(scale)).encode())


def check_unchanged(store: NodeStore, what: str, fingerprint: bytes, files: Sequence[Path]) -> None:
    """Check that a run continues with what it has read first on this node, also if it is resumed.

    Parameters
    ----------
    store : NodeStore
        The run's; it keeps the first fingerprint.
    what : str
        What was read.
    fingerprint : bytes
        Of what was read now.
    files : Sequence[Path]
        Where, for the error; without any, nothing is checked.

    Raises
    ------
    FilesChangedError
        If the fingerprint is another than the first.
    """
    if files and not is_as_first_read(store, what, fingerprint):
        places = ", ".join(str(path) for path in files if path.exists())
        raise FilesChangedError(
            f"{places}: changed since this run has read it (put back what was there, or start a "
            "new run with what is there now)"
        )


def is_as_first_read(store: NodeStore, what: str, fingerprint: bytes) -> bool:
    """Whether a run reads what it read first on this node; the first fingerprint is kept."""
    store, name = store.at(None), f"read-{what}"
    first = store.read(name, most=len(fingerprint))
    if first is None:
        store.write(name, fingerprint)
    return first in (None, fingerprint)


def virtual_per_class(session: Session, per_class: int, formation: int = 1) -> int:
    """Virtual samples of each class, no more than the node's owner lets leave.

    Those with a `formation` hold its square of smaller ones, which count.

    Raises
    ------
    SettingsError
        If a class has too few samples for one.
    """
    rule = int(session.node_config.get(REAL_PER_VIRTUAL, 1))
    if rule == 1:
        return per_class
    real = rule * formation**2
    smallest = int(torch.unique(session.data.train.labels, return_counts=True)[1].min())
    if smallest < real:
        raise SettingsError(
            f"the node's policy: real-per-virtual asks for {real} samples of a class, and one has "
            f"{smallest} "
            "(ask for differential privacy, dp-epsilon, or have its owner leave the class out)"
        )
    if smallest // real < per_class:
        log(
            INFO,
            "%d virtual samples of a class instead of %d: the policy asks for %d real ones each",
            smallest // real,
            per_class,
            real,
        )
    return min(per_class, smallest // real)


def own_file(node_config: Mapping[str, NodeConfigValue], name: str) -> str:
    """The path of the owner's file or folder for ``@NAME``; any other name is unchanged.

    Raises
    ------
    SettingsError
        If the owner has none of this name.
    """
    if not OWN_FILE.fullmatch(name):
        return name
    if (path := node_config.get(f"{FILE}{name}")) is None:
        raise SettingsError(
            f"this node has no file called {name} (its owner can add it to `files` of the node's "
            "settings)"
        )
    return str(path)


def held_out(session: Session) -> Samples:
    """The node's held-out samples.

    Raises
    ------
    SettingsError
        If there are none.
    """
    holdout = session.data.holdout
    if not len(holdout):
        raise SettingsError(
            f"train.holdout = {session.task.train.holdout} leaves this node no sample to evaluate "
            "on (set it to 0.1, or fraction-evaluate to 0)"
        )
    return holdout


def deadline_of(message: Message) -> float:
    """When the reply is due, by `time.monotonic`; call it when a handler begins.

    The message's own time stamp does not serve: it is by the server's clock.
    """
    return time.monotonic() + message.metadata.ttl


def _generator(seed: int, identity: int, purpose: str, server_round: int = 0) -> torch.Generator:
    words = [seed, identity, zlib.crc32(purpose.encode()), server_round]
    state = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def _data_files(
    task: TaskSettings,
    node_config: tuple[tuple[str, NodeConfigValue], ...],
    device: torch.device,
    scale: Scale | None = None,
) -> list[Path]:
    """Files and folders that `_local_data` may read, there or not."""
    node = dict(node_config)
    data_root = str(node.get("data-root", ""))
    files = source_files(task, data_root)  # of the spec, where the node has data of its own
    if name := node.get("dataset"):
        return [*files, *source_files(task.model_copy(update={"dataset": str(name)}), data_root)]
    return [*files, Path(str(node["data"]))] if "data" in node else files


@read_once(_data_files, maxsize=32)
def _local_data(
    task: TaskSettings,
    node_config: tuple[tuple[str, NodeConfigValue], ...],
    device: torch.device,
    scale: Scale | None = None,
) -> LocalData:
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
            'node config: data is not set, and dataset = "private" means that every node brings '
            "its own (start the node with --data FOLDER)"
        )
    elif "partition-id" not in node or "num-partitions" not in node:
        raise SettingsError(
            "node config: neither data nor partition-id and num-partitions are set "
            "(start the node with --data FOLDER, or --partition-id I --num-partitions N)"
        )
    else:
        raw = partition_samples(task, identity, int(node["num-partitions"]), data_root)
    used = _in_used_classes(torch.tensor(raw.labels), node, spec).nonzero().flatten()
    if HOLDOUT in node:
        chosen = _chosen_by_owner(node, len(raw))[used]
        held, rest = used[chosen], used[~chosen]
    else:
        order = torch.randperm(len(used), generator=_generator(task.seed, identity, "holdout"))
        num_held_out = int(task.train.holdout * len(used))
        held, rest = used[order[:num_held_out]], used[order[num_held_out:]]
    return LocalData(
        spec=spec,
        train=place(raw.to_samples(spec, rest), device),
        holdout=place(raw.to_samples(spec, held), device),
        fingerprint=fingerprint_of(data_spec(task, data_root), raw),
        moments=moments_of(raw.subset(used.numpy()), table) if table else None,
    )


def _chosen_by_owner(node: Mapping[str, NodeConfigValue], num_samples: int) -> Tensor:
    """Which samples the owner holds out, bool (n,): by place in the data, and a secret of the node.

    Places are those before anything that a run chooses, and each draw is by itself, so no run can
    have other samples held out.
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
    elif fewest := int(node.get(FEWEST_OF_A_CLASS, 0)):
        rule, used = f"fewest-of-a-class = {fewest}", labels.bincount()[labels] >= fewest
    else:
        return torch.ones(len(labels), dtype=torch.bool)
    if not used.any():
        raise SettingsError(
            f"the node's policy: {rule}, and none of its samples is of such a class"
        )
    return used
