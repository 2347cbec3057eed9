"""The run's task on the server: data shape, model and evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log
from torch import Tensor, nn

from flwr_distill.protocol.arrays import as_arrays, load_arrays
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.augmentation import chosen_changes
from flwr_distill.task.auxiliary_names import OWN_FILE
from flwr_distill.task.backbones import Frozen, whole_state
from flwr_distill.task.compute.device import choose_device, describe_device
from flwr_distill.task.datasets import Dataset, DataSpec, Samples, fingerprint_of
from flwr_distill.task.datasets.registry import data_root
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import count, outputs
from flwr_distill.task.file_state import FilesChangedError
from flwr_distill.task.models import ModelError, last_dense, model_of
from flwr_distill.task.scores import MAX_CLASSES, class_accuracy, scores
from flwr_distill.task.source import check_partition_settings, data_spec, server_data, source_files


def server_evaluation(
    model: nn.Module, test: Samples, device: torch.device | str = "cpu"
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """A function that evaluates a round's model; it overwrites the weights of `model`.

    It returns ``loss`` (mean cross-entropy, nats) and the metrics of `task.scores.scores`, with
    hyphens. Lists are ``class-accuracy``, with NaN for classes without samples, and, unless there
    are too many classes, ``counts``: the vector of `task.scores.Counts`.
    """
    samples = test

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal samples
        load_arrays(model, as_arrays(arrays))
        if samples is test and isinstance(model, Frozen) and not model.trained:
            samples = _as_vectors(model, test, device)  # once: they do not change
        counts, loss = count(model, samples, device)
        metrics = MetricRecord({"loss": loss})
        metrics.update({k.replace("_", "-"): value for k, value in scores(counts).items()})
        metrics["class-accuracy"] = class_accuracy(counts.confusion).tolist()
        if len(counts.confusion) <= MAX_CLASSES:
            metrics["counts"] = counts.to_vector().tolist()
        return metrics

    return evaluate


def _as_vectors(model: Frozen, samples: Samples, device: torch.device | str) -> Samples:
    model.to(device).eval()
    return Samples(outputs(model.vectors, samples.inputs, device), samples.labels)


Evaluate = Callable[[int, ArrayRecord], MetricRecord]


@dataclass(frozen=True)
class Task:
    """The data shape, model and evaluation that a federation trains with."""

    spec: DataSpec
    model: nn.Module
    start: ArrayRecord  # initial weights without frozen ones, as they are sent
    device: torch.device  # of the server
    evaluate: Evaluate | None  # None if the server has no test samples
    tested: tuple[int, ...]  # labels of the test samples; all labels without any
    data: Dataset | None = None  # the named data set as the server has read it
    fingerprint: str = ""  # its hash

    @classmethod
    def of(cls, settings: RunSettings) -> "Task":
        """Build the task from a run's settings.

        Raises SettingsError, DatasetError, ModelError or PartitionError if they are impossible.
        """
        settings = _with_own_weights(settings)
        spec = data_spec(settings)
        check_partition_settings(settings)
        chosen_changes(settings.train.augment, spec)
        model = model_of(settings, spec, seed=settings.seed)
        _check_layer(model, settings.train.feature_layer)
        if settings.evaluate.model:
            from flwr_distill.server.export.evaluated import read_evaluated  # here: imports onnx

            read_evaluated(Path(settings.evaluate.model)).load_into(model, spec)
        device = choose_device(settings.server_device, "server-device")
        log(INFO, "The server computes on %s", describe_device(device))
        data = server_data(settings)
        test = data.test if data else None
        return cls(
            spec=spec,
            model=model,
            start=ArrayRecord(model.state_dict()),
            device=device,
            evaluate=server_evaluation(model, test.to_samples(spec), device) if test else None,
            tested=tuple(np.unique(test.labels).tolist() if test else range(spec.num_classes)),
            data=data,
            fingerprint=_fingerprint(data),
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by label; empty if nodes name them."""
        return self.spec.class_names if self.data else self.spec.labels.classes

    def check_data(self, settings: RunSettings) -> None:
        """Raise FilesChangedError if the server's data set, on which it tests, has changed."""
        if self.data is None:
            return
        data = server_data(settings)
        if data is not self.data and _fingerprint(data) != self.fingerprint:
            files = ", ".join(str(path) for path in source_files(settings) if path.exists())
            raise FilesChangedError(
                f"{files}: changed on the server since this run has read it",
                where="dataset",
                value=settings.dataset,
                remedy="start a new run with the present files",
            )

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The part of the model that no message contains."""
        state = whole_state(self.model)
        return {name: value for name, value in state.items() if name not in self.start}

    def whole(self, sent: ArrayRecord) -> ArrayRecord:
        """A model of the run with its frozen part, for files that stand alone."""
        return ArrayRecord({**ArrayRecord(self.frozen), **sent})

    def check_frozen(self, then: Mapping[str, Tensor]) -> None:
        """Raise SettingsError if the frozen part that a run began with differs from ours."""
        for name, value in self.frozen.items():
            if name not in then or not torch.equal(then[name], value):
                raise SettingsError(
                    f"the run's frozen network had another {name}",
                    where="model",
                    remedy="give the server and all nodes the file or package again that it had "
                    "then, or start a new run",
                )


def _fingerprint(data: Dataset | None) -> str:
    return fingerprint_of(data.spec, data.train, data.test).hex() if data else ""


def _with_own_weights(settings: RunSettings) -> RunSettings:
    """The settings with a path for ``backbone.weights = "@NAME"``: here, NAME in the data root."""
    name = settings.backbone.weights
    if not OWN_FILE.fullmatch(name):
        return settings
    folder = Path(settings.data_root) if settings.data_root else data_root()
    backbone = settings.backbone.model_copy(update={"weights": str(folder / name[1:])})
    return settings.model_copy(update={"backbone": backbone})


def _check_layer(model: nn.Module, name: str) -> None:
    if not name:
        return
    try:
        last_dense(model, name)
    except ModelError as error:
        remedy = 'leave it at "" for the last one'
        raise SettingsError(
            str(error), where="train.feature-layer", value=name, remedy=remedy
        ) from None
