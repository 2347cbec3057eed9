"""The model that a run evaluates: from a run's folder, or from a model file."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from flwr_distill.base.text import listed
from flwr_distill.protocol.meeting import one_line
from flwr_distill.server.export.description import KEY, Description
from flwr_distill.server.export.model import run_to_export, weights_of
from flwr_distill.server.page.run_files import flat, read_run
from flwr_distill.server.settings import default_settings
from flwr_distill.task.backbones import whole_state
from flwr_distill.task.columns import Columns
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.datasets.types import PRIVATE
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue, TaskSettings

WHERE = "evaluate.model"
_TASK = {field.alias or name for name, field in TaskSettings.model_fields.items()}
_OF_THE_RUN = (_TASK | {"secure-sums"}) - {"evaluate", "simulation"}
"""Settings of a run, by their table, that its evaluation has too: held-out samples are the same."""
_HOLDS_OUT = ("seed", "dataset", "train.holdout")
"""Settings by which nodes hold samples out, besides those of ``partition``."""


class EvaluatedModelError(ReportedError):
    """The model cannot be evaluated: it is unreadable, or does not fit the run."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model from a run's folder or a file."""

    path: Path
    weights: dict[str, Tensor]
    description: Description | None
    """Its inputs and classes; None for a file of weights alone."""
    run: dict[str, Any]
    """Settings of its run, dotted; empty for a file."""

    def settings(self) -> dict[str, RunConfigValue]:
        """What a run must be given to evaluate it, as far as that is known.

        An architecture that is code is for the user to name, unless it comes from a run's settings.
        """
        defaults = flat(default_settings())
        known: dict[str, RunConfigValue] = {
            key: value
            for key, value in self.run.items()
            if key.partition(".")[0] in _OF_THE_RUN and defaults.get(key) != value
        }
        if self.description is None:
            return known
        spec = self.description.spec
        if not self.run:
            known["dataset"] = spec.name
        if not self.run and not self.description.is_code:
            backbone = self.description.backbone.model_dump(by_alias=True, exclude_defaults=True)
            known |= {"model": self.description.model} | flat({"backbone": backbone})
        return known | (_private(spec) if spec.name == PRIVATE else {})

    def load_into(self, model: nn.Module, spec: DataSpec) -> None:
        """Give a model these weights; EvaluatedModelError unless all fit, and its data do."""
        if problem := self._problem(whole_state(model), spec):
            raise EvaluatedModelError(
                problem,
                where=WHERE,
                value=str(self.path),
                remedy="give the run the model's own settings: -c 'dataset=... model=...'",
            )
        model.load_state_dict(self.weights)

    def _problem(self, state: dict[str, Tensor], spec: DataSpec) -> str:
        if odd := sorted(state.keys() ^ self.weights.keys()):
            which = "it has no" if odd[0] in state else "the run's model has no"
            return f"{which} weights {listed(odd)}"
        for name, own in self.weights.items():
            if own.shape != state[name].shape:
                shapes = f"{tuple(own.shape)}, and in the run's model {tuple(state[name].shape)}"
                return f"{name} has shape {shapes}"
            if own.is_floating_point() != state[name].is_floating_point():
                types = f"{own.dtype}, and in the run's model {state[name].dtype}"
                return f"{name} is of {types}"
            if own.is_floating_point() and not own.isfinite().all():
                return f"{name} has NaN or infinity"
        if self.description is None:
            return ""
        own_spec = self.description.spec
        is_named = own_spec.labels.classes and spec.labels.classes
        if is_named and (difference := own_spec.labels.difference(spec.labels)):
            return difference
        if (own_spec.shape, own_spec.mean, own_spec.std) != (spec.shape, spec.mean, spec.std):
            return "its inputs have another shape or normalisation than the run's data"
        return ""


def read_evaluated(path: Path) -> EvaluatedModel:
    """Read a run's last model, or a model file: the suffix tells the format.

    ONNX and safetensors files are data alone; a TorchScript file is a program, loaded here. Raises
    EvaluatedModelError if there is no model of which all weights are readable, and what
    `run_to_export` and `load_checkpoint` raise.
    """
    if path.is_dir():
        run = run_to_export(read_run(path))
        return EvaluatedModel(path, weights_of(run), Description.of(run), flat(run.settings))
    if not path.is_file():
        raise _unreadable(path, "there is no such file or folder here")
    if path.suffix not in _READERS:
        problem = f"a model's name ends in {', '.join(_READERS)}, got {path.suffix or 'none'!r}"
        raise _unreadable(path, problem)
    try:
        weights, text = _READERS[path.suffix](path)
        description = Description.from_json(text) if text else None
    except (DecodeError, RuntimeError, SafetensorError, ValueError) as error:
        reason = one_line(error) or type(error).__name__
        raise _unreadable(path, f"not a model that can be read here: {reason}") from error
    return EvaluatedModel(path, weights, description, {})


def unlike_training(run: Path, settings: Mapping[str, Any], samples: Mapping[str, Any]) -> str:
    """Why samples that nodes hold out may have been in a run's training; empty if nothing shows.

    `settings` are the evaluation's, and `samples` what nodes have, by name.
    """
    training = read_run(run)
    then, now = flat(training.settings), flat(settings)
    changed = [
        f"{key} was {then[key]!r}"
        for key, value in now.items()
        if (key in _HOLDS_OUT or key.startswith("partition.")) and then.get(key, value) != value
    ]
    had = {node["name"]: node["samples"] for node in training.about.get("nodes", {}).values()}
    nodes = [name for name, number in samples.items() if had.get(name) != number]
    if nodes:
        changed.append(f"{listed(nodes)} had other data, or took no part")
    if not changed:
        return ""
    return f"held-out samples may have been in its training: {'; '.join(changed)}"


def _unreadable(path: Path, problem: str) -> EvaluatedModelError:
    remedy = "flwr-distill runs export RUN --format safetensors writes one, where the server runs"
    return EvaluatedModelError(problem, where=WHERE, value=str(path), remedy=remedy)


def _safetensors(file: Path) -> tuple[dict[str, Tensor], str]:
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(KEY, "")
    return load_file(file), text


def _torchscript(file: Path) -> tuple[dict[str, Tensor], str]:
    metadata = {KEY: ""}
    program = torch.jit.load(file, "cpu", _extra_files=metadata)  # type: ignore[no-untyped-call]
    return dict(program.state_dict()), metadata[KEY]


def _onnx(file: Path) -> tuple[dict[str, Tensor], str]:
    """Weights that the exporter has left unchanged; folded ones are missing."""
    program = onnx.load(file)
    own = {i.name: numpy_helper.to_array(i) for i in program.graph.initializer}
    if folded := [name for name in own if "::" in name]:
        raise ValueError(
            f"the exporter has folded weights into others ({listed(folded)}), and nodes evaluate "
            "the model itself: take its .safetensors"
        )
    weights = {name: torch.from_numpy(array.copy()) for name, array in own.items()}
    return weights, {e.key: e.value for e in program.metadata_props}.get(KEY, "")


_READERS = {".onnx": _onnx, ".pt": _torchscript, ".safetensors": _safetensors}


def _private(spec: DataSpec) -> dict[str, RunConfigValue]:
    """Format of nodes' own data, with the classes and the scale that the model was trained with."""
    own: dict[str, RunConfigValue] = {"private.shape": "x".join(map(str, spec.shape))}
    if spec.labels.columns:
        columns = Columns.of_inputs(spec.labels.columns).features
        scales = dict(zip(spec.labels.columns, zip(spec.mean, spec.std, strict=True), strict=True))
        own = {"private.columns": ",".join(_column(c.name, c.categories, scales) for c in columns)}
    classes = ",".join(spec.labels.classes)
    is_stated = classes and classes.count(",") == len(spec.labels.classes) - 1
    return own | ({"private.classes": classes} if is_stated else {})


def _column(name: str, categories: tuple[str, ...], scales: dict[str, tuple[float, float]]) -> str:
    if categories:
        return f"{name}:{'|'.join(categories)}"
    mean, deviation = (f"{Decimal(repr(value)):f}" for value in scales[name])
    return f"{name}:{mean}+-{deviation}"
