"""Handlers of our methods in someone's own ClientApp, on their model and their data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import Dataset

from flwr_distill.client.app import app as methods_app
from flwr_distill.client.local_data import LocalData, NodeConfigValue
from flwr_distill.client.session import (
    SourcedContext,
    data_name,
    device_of,
    is_as_first_read,
    store_of,
)
from flwr_distill.protocol.messages import CLASSES, HOLDOUT, MIN_OF_A_CLASS
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods, find_method, phases_of
from flwr_distill.task.compute.device import place
from flwr_distill.task.datasets import DatasetError, DataSpec, RawSamples, Samples, fingerprint_of
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.file_state import FilesChangedError
from flwr_distill.task.models import create_own_model
from flwr_distill.task.plugin import PluginError, located, path_of
from flwr_distill.task.settings import TaskSettings

Part = Dataset[Any] | tuple[Tensor, Tensor]
MakeModel = Callable[[], nn.Module]
LoadData = Callable[[Context], tuple[Part, Part]]
Items = tuple[tuple[str, NodeConfigValue], ...]

MIDDLE = 0.5
"""Expected mean and deviation of normalised pixels, which are then in [-1, 1]."""


def add_methods(app: ClientApp, *methods: str, model: MakeModel, data: LoadData) -> None:
    """Add the handlers of methods to a ClientApp; call it below the app's own handlers.

    Handlers that the app registered before stay, such as ``@app.train()``. Ours train with the
    ``train.*`` and ``seed`` of the run config, by default those of :mod:`task.settings`, and with
    what the ServerApp's ``train_config`` says.

    Parameters
    ----------
    app : ClientApp
        Made without a ``client_fn``.
    *methods : str
        Names such as ``hfldd``.
    model : callable
        Makes the model: floats (n, C, H, W) to logits (n, classes). The ServerApp's initial arrays
        are those of such a model.
    data : callable
        Given Flower's context, returns training and test samples. Each part is a pair of tensors,
        floats (n, C, H, W) and labels from 0, or a ``Dataset`` of such pairs. It must return the
        same samples each time. Pixels are best normalised with mean and deviation 0.5.

    Raises
    ------
    SettingsError
        If there is no such method, or it trains by loss terms and the app has its own
        ``@app.train()``, which would ignore them.
    """
    source = AppSource(model, data)

    def answer(message: Message, context: Context) -> Message:
        return methods_app(message, SourcedContext(context, source))

    declared = [_find(name) for name in methods]
    for message_type in {kind: None for method in declared for kind in phases_of(method)}:
        category, _, action = message_type.partition(".")
        register = getattr(app, category)(action or "default")
        try:
            register(answer)
        except ValueError:  # the app has its own
            if message_type == MessageType.TRAIN:
                _check_own_train(declared)


@dataclass(frozen=True)
class AppSource:
    """Model and data by functions of someone's app; see `add_methods`."""

    make: MakeModel
    load: LoadData

    def task(self, context: Context) -> TaskSettings:
        """Settings of training; other keys of the run config are the app's own."""
        run = context.run_config
        tables = ("train.", "virtual.") if run.get("train.on") == "virtual" else ("train.",)
        own = {key: run[key] for key in run if key == "seed" or key.startswith(tables)}
        return TaskSettings.from_run_config(own)

    def spec(self, context: Context, task: TaskSettings) -> DataSpec:
        """Shape of the samples, and the classes that the model has outputs for."""
        return self.data(context, task, device_of(context)).spec

    def data(
        self, context: Context, task: TaskSettings, device: torch.device, *, scaled: bool = True
    ) -> LocalData:
        """The node's samples, loaded once per run and process.

        Raises
        ------
        SettingsError
            If the node's owner has a rule on samples, which cannot be enforced here.
        DatasetError
            If the samples do not fit the model, are malformed, or are not those of the run's start.
        PluginError
            If one of the functions fails; the text has its file and line.
        """
        _check_rules(context)
        node, run = (tuple(sorted(c.items())) for c in (context.node_config, context.run_config))
        data = _load(self, context.run_id, context.node_id, node, run, device)
        if not is_as_first_read(store_of(context), data_name(context), data.fingerprint):
            raise FilesChangedError(
                "its samples are not those with which this run started",
                where=f"data = {path_of(self.load)}",
                remedy="return the same ones each time: seed its split, and leave random changes "
                "of images to train.augment",
            )
        return data

    def model(self, task: TaskSettings, spec: DataSpec, seed: int | None = None) -> nn.Module:
        """A new model; without a `seed`, that of the run draws its weights."""
        return create_own_model(self.make, spec, task.seed if seed is None else seed)


@lru_cache(maxsize=32)  # virtual nodes of a simulation share a process
def _load(
    source: AppSource, run_id: int, node_id: int, node: Items, run: Items, device: torch.device
) -> LocalData:
    where = f"data = {path_of(source.load)}"
    context = Context(run_id, node_id, dict(node), RecordDict(), dict(run))
    try:
        parts = source.load(context)
    except Exception as error:  # whatever the app's code does
        raise PluginError(f"{where} failed: {located(error, path_of(source.load))}") from error
    if not (isinstance(parts, tuple | list) and len(parts) == 2):
        found = type(parts).__name__
        raise DatasetError(f"returned {found}", where=where, remedy="return (train, test)")
    train, test = (
        _samples(part, f"{where}, {name} samples")
        for part, name in zip(parts, ("training", "test"), strict=True)
    )
    if not len(train):
        raise DatasetError("there are no training samples", where=where)
    if not len(test):
        test = train.subset([])
    shape = tuple(train.inputs.shape[1:])
    if tuple(test.inputs.shape[1:]) != shape:
        raise DatasetError("test samples have another shape than training samples", where=where)
    spec = _spec_of(source, shape)
    labels = torch.cat([train.labels, test.labels])
    if labels.min() < 0 or labels.max() >= spec.num_classes:
        raise DatasetError(
            f"labels are from {labels.min()} to {labels.max()}, and model = {path_of(source.make)} "
            f"has {spec.num_classes} outputs",
            where=where,
            remedy="number classes from 0, or give the model more outputs",
        )
    read = (RawSamples(part.inputs.numpy(), part.labels.numpy()) for part in (train, test))
    return LocalData(spec, place(train, device), place(test, device), fingerprint_of(spec, *read))


def _samples(part: Any, where: str) -> Samples:
    """Samples of a pair of tensors or a data set, on the CPU and checked."""
    try:
        if isinstance(part, Sequence):
            inputs, labels = (torch.as_tensor(tensor).cpu() for tensor in part)
        else:
            pairs = [part[place] for place in range(len(part))]
            inputs = torch.stack([torch.as_tensor(image) for image, _ in pairs] or [torch.empty(0)])
            labels = torch.tensor([_whole(label) for _, label in pairs])
    except Exception as error:  # whatever a data set of others does
        raise DatasetError(
            f"cannot read a {type(part).__name__}: {' '.join(str(error).split())[:200]}",
            where=where,
            remedy="return a pair of tensors, or a Dataset of pairs (image, label) of one shape",
        ) from error
    if not len(labels):
        return Samples(inputs[:0], labels.long())
    if inputs.ndim != 4 or not inputs.is_floating_point() or len(inputs) != len(labels):
        raise DatasetError(
            f"{len(labels)} labels, and inputs of type {inputs.dtype}, shape {tuple(inputs.shape)}",
            where=where,
            remedy="return floats (n, C, H, W): a table's columns are channels, "
            "x[:, :, None, None]; pixels are (x / 255 - 0.5) / 0.5",
        )
    if labels.ndim != 1 or labels.is_floating_point() or not inputs.isfinite().all():
        raise DatasetError("need finite inputs, and a whole number as label of each", where=where)
    return Samples(inputs.float(), labels.long())


def _whole(label: Any) -> int:
    """A label as a whole number; others are refused, not cut off."""
    number = int(label)
    if float(label) != number:
        raise ValueError("a label is no whole number")
    return number


def _spec_of(source: AppSource, shape: tuple[int, ...]) -> DataSpec:
    """Shape and classes, which are the same on all nodes: the model's outputs."""
    path = path_of(source.make)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            output = source.make().eval()(torch.zeros(2, *shape))
        num_classes = int(output.shape[1])
    except Exception as error:  # the model is the app's
        raise PluginError(
            f"model = {path} fails on samples of shape {shape}: {located(error, path)}"
        ) from error
    channels, height, width = shape
    middle = (MIDDLE,) * channels
    kind: Literal["image", "table"] = "image" if height * width > 1 else "table"
    return DataSpec(
        path_of(source.load), (channels, height, width), num_classes, middle, middle, kind
    )


def _find(name: str) -> Method:
    if method := find_method(name):
        return method
    known = sorted(name for name, method in all_methods().items() if method.strategy)
    raise SettingsError("unknown method", where="add_methods", value=name, remedy=", ".join(known))


def _check_own_train(methods: Sequence[Method]) -> None:
    """Refuse methods that need our ``train``, where the app has its own."""
    for method in methods:
        if method.trains_plainly:
            raise SettingsError(
                "it needs its own training for plain train messages, and the app has one",
                where="add_methods",
                value=method.name,
                remedy="remove @app.train() from the app; if another add_methods registered it, "
                "name all methods in one call",
            )


def _check_rules(context: Context) -> None:
    node = context.node_config
    for key, is_set in (
        (HOLDOUT, HOLDOUT in node),
        (CLASSES, bool(node.get(CLASSES))),
        (MIN_OF_A_CLASS, int(node.get(MIN_OF_A_CLASS, 1)) > 1),
    ):
        if is_set:
            raise SettingsError(
                "a rule on the node's own data cannot be applied to data that an app's function "
                "brings",
                where=key,
                source="the node's policy",
                remedy="run it on nodes without",
            )
