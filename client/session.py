"""What a message handler works with: the run's settings, the node's data, device and store."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from logging import INFO
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import Context, Message
from flwr.common import log
from pydantic import TypeAdapter
from torch import nn

from flwr_distill.client.local_data import (
    LocalData,
    NodeConfigValue,
    data_files,
    generator_of,
    local_data,
)
from flwr_distill.client.virtual_data import trained_on
from flwr_distill.protocol.messages import (
    FILE,
    HOLDOUT,
    REAL_PER_VIRTUAL,
)
from flwr_distill.storage.store import DURABLE, NodeStore
from flwr_distill.task.auxiliary_names import OWN_FILE
from flwr_distill.task.columns import Scale
from flwr_distill.task.compute.device import choose_device
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.file_state import FilesChangedError
from flwr_distill.task.labels import MAX_NAMES
from flwr_distill.task.models import model_of
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec, open_columns, server_data

SCALE = "column-scale"
"""Blob with the run's means and deviations of a table's columns."""
SCALE_BYTES = 100
"""More than a mean and a deviation take in it."""


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
    """Flower's context of a node whose model and data come from another `Source`."""

    def __init__(self, context: Context, source: Source) -> None:
        self.__dict__.update(context.__dict__)
        self.source = source


@dataclass(frozen=True)
class Session:
    """A node in a run, as handlers see it.

    `own` are the node's samples. `identity` is its ``partition-id``, else its Flower node id; it
    seeds its random draws. `store` has the node's files for this run.
    """

    task: TaskSettings
    own: LocalData
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

        Raises
        ------
        SettingsError
            If a setting is wrong, the node has neither ``data`` nor a partition, or it does not
            know the run's scale.
        FilesChangedError
            If the data are no longer those with which this run began on this node.
        """
        node, source, device = dict(context.node_config), source_of(context), device_of(context)
        task = source.task(context)
        return cls(
            task=task,
            own=source.data(context, task, device, scaled=scaled),
            device=device,
            store=store_of(context),
            identity=int(node.get("partition-id", context.node_id)),
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=node,
            source=source,
        )

    @cached_property
    def data(self) -> LocalData:
        """What the run trains and evaluates on: the node's own samples.

        With ``train.on="virtual"`` the training samples are images distilled of these, which are
        made when they are first needed.
        """
        if self.task.train.on == "real":
            return self.own
        virtual = trained_on(
            self.own,
            self.task.virtual,
            self.generator("virtual"),
            self.device,
            self.store.at(None),
        )
        return replace(self.own, train=virtual)

    def in_round(self, server_round: int) -> "Session":
        """The same session, with the store of a round."""
        return replace(self, store=self.store.at(server_round))

    def generator(self, purpose: str, server_round: int = 0) -> torch.Generator:
        """CPU generator seeded by the run's seed, the node, the purpose and the round."""
        return generator_of(self.task.seed, self.identity, purpose, server_round)

    def new_model(self, seed: int | None = None) -> nn.Module:
        """Model with new weights, on the CPU; without a `seed`, that of the run draws them."""
        return self.source.model(self.task, self.own.spec, seed)


@dataclass(frozen=True)
class RunSource:
    """Model and data as the run's settings and the node config name them."""

    def task(self, context: Context) -> TaskSettings:
        """The run's task, with the owner's files in place of ``@NAME``."""
        task = TaskSettings.from_run_config(context.run_config)
        weights = own_file(context.node_config, task.backbone.weights)
        index_file = own_file(context.node_config, task.partition.index_file)
        backbone = task.backbone.model_copy(update={"weights": weights})
        partition = task.partition.model_copy(update={"index_file": index_file})
        return task.model_copy(update={"backbone": backbone, "partition": partition})

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
                "this node does not know the means and deviations of the run's columns",
                where="state-dir",
                value=context.node_config.get("state-dir", ""),
                remedy="it is not that of the first meeting: start the run again",
            )
        config = tuple(sorted(context.node_config.items()))
        data = local_data(task, config, device, scale)
        files = data_files(task, config, device, scale)
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
    durable = bool(context.node_config.get(DURABLE, True))
    return NodeStore.open(state_dir, context.run_id, context.node_id, durable=durable)


def data_name(context: Context) -> str:
    """Name under which `check_unchanged` keeps the fingerprint of a node's data."""
    partition = context.node_config.get("partition-id")
    return "data" if partition is None else f"data-{partition}"


def scale_of(store: NodeStore, task: TaskSettings) -> Scale | None:
    """What a table's columns are standardised by in the run, if this node knows it."""
    names = open_columns(task)
    return kept_scale(store, len(names)) if names else None


def kept_scale(store: NodeStore, num_columns: int = MAX_NAMES) -> Scale | None:
    """What the server said that columns are standardised by; None if it has not."""
    text = store.at(None).read(SCALE, most=SCALE_BYTES * num_columns)
    return None if text is None else TypeAdapter(Scale).validate_json(text)


def keep_scale(store: NodeStore, scale: Scale) -> None:
    """Keep what a table's columns are standardised by, for the rest of the run."""
    store.at(None).write(SCALE, json.dumps(asdict(scale)).encode())


def check_unchanged(store: NodeStore, what: str, fingerprint: bytes, files: Sequence[Path]) -> None:
    """Check that a run reads what it read first on this node, also if it is resumed.

    The store keeps the first fingerprint. Without any `files`, nothing is checked; a
    FilesChangedError names them.
    """
    if files and not is_as_first_read(store, what, fingerprint):
        places = ", ".join(str(path) for path in files if path.exists())
        raise FilesChangedError(
            "changed since this run has read it",
            where=places,
            remedy="put back what was there, or start a new run with what is there now",
        )


def is_as_first_read(store: NodeStore, what: str, fingerprint: bytes) -> bool:
    """Whether a run reads what it read first on this node; the first fingerprint is stored."""
    store, name = store.at(None), f"read-{what}"
    first = store.read(name, most=len(fingerprint))
    if first is None:
        store.write(name, fingerprint)
    return first in (None, fingerprint)


def virtual_per_class(session: Session, per_class: int, formation: int = 1) -> int:
    """Virtual samples of each class, no more than the node's owner lets leave.

    Images with a `formation` contain its square of smaller ones, which count. A class with too few
    samples for one is a SettingsError.
    """
    rule = int(session.node_config.get(REAL_PER_VIRTUAL, 1))
    if rule == 1:
        return per_class
    real = rule * formation**2
    smallest = int(torch.unique(session.own.train.labels, return_counts=True)[1].min())
    if smallest < real:
        raise SettingsError(
            f"the node's policy needs {real} samples of a class, and one has {smallest}",
            where=REAL_PER_VIRTUAL,
            value=rule,
            remedy="ask for differential privacy, dp-epsilon, or have its owner exclude the class",
        )
    if smallest // real < per_class:
        text = "%d virtual samples of a class instead of %d: the policy needs %d real ones each"
        log(INFO, text, smallest // real, per_class, real)
    return min(per_class, smallest // real)


def own_file(node_config: Mapping[str, NodeConfigValue], name: str) -> str:
    """The path of the owner's file or folder for ``@NAME``; any other name is unchanged."""
    if not OWN_FILE.fullmatch(name):
        return name
    if (path := node_config.get(f"{FILE}{name}")) is None:
        raise SettingsError(
            f"this node has no file called {name}",
            where="files",
            remedy="its owner can add it to `files` of the node's settings",
        )
    return str(path)


def held_out(session: Session) -> Samples:
    """The node's held-out samples; SettingsError if there are none."""
    holdout, share = session.own.holdout, session.task.train.holdout
    if len(holdout):
        return holdout
    problem, where = "this node has no sample to evaluate on", "train.holdout"
    value: float | None = share
    remedy = "set it to 0.1"
    if session.source != RunSource():
        where, value, remedy = "data", None, "return test samples"
    elif HOLDOUT in session.node_config:
        where, value = "the node's policy: holdout", float(session.node_config[HOLDOUT])
        remedy = "its owner can raise it"
    elif share:  # how many samples there are stays on the node
        problem += ": its samples times this are less than one"
        remedy = "raise it"
    raise SettingsError(
        problem, where=where, value=value, remedy=f"{remedy}, or set fraction-evaluate to 0"
    )


def common_test_set(session: Session) -> Samples:
    """The test samples of the run's named data set; SettingsError if it has none."""
    root = str(session.node_config.get("data-root", "")) or session.task.data_root
    data = server_data(session.task.model_copy(update={"data_root": root}))
    if data is None:
        raise SettingsError(
            "is not one data set with a test set", where="dataset", value=session.task.dataset
        )
    return data.test.to_samples(session.data.spec)


def deadline_of(message: Message) -> float:
    """When the reply is due, by `time.monotonic`; call it when a handler starts.

    The message's own time stamp does not serve: it is by the server's clock.
    """
    return time.monotonic() + message.metadata.ttl
