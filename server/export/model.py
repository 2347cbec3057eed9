"""A run's model in formats that other programs read."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protocol.arrays import as_arrays, as_tensors
from server.page import RunFiles
from server.page.comparison import best
from server.record.checkpoint import checkpoints, load_checkpoint
from task.datasets import DataSpec
from task.models import create_model

MODEL = "model.safetensors"
Format = Literal["safetensors", "torchscript", "onnx"]
FILES: dict[Format, str] = {
    "safetensors": MODEL,
    "torchscript": "model.pt",
    "onnx": "model.onnx",
}
TOLERANCE = 1e-3


class ExportError(ValueError):
    """A run without a model, or a model that a format cannot hold."""


def run_to_export(run: RunFiles, best_round: bool = False) -> RunFiles:
    """Return a run as it was when it had the model that is to be exported.

    Parameters
    ----------
    run : RunFiles
        A run that is over, goes on, or was broken off.
    best_round : bool (default: False)
        Take the model of the round with the highest accuracy in place of the last.

    Raises
    ------
    ExportError
        If no model was kept.
    """
    kept = set(checkpoints(run.folder))
    if (run.folder / MODEL).exists() and run.rows:
        kept.add(run.rows[-1]["round"])
    peak = best(run.rows)
    wanted = peak["round"] if best_round and peak else max(kept, default=None)
    if wanted not in kept or "spec" not in run.about:
        raise ExportError(
            f"{run.folder} holds no model of that round (rounds kept: {sorted(kept)})"
        )
    return replace(run, rows=[row for row in run.rows if row["round"] <= wanted])


def export_model(run: RunFiles, form: Format, folder: Path) -> Path:
    """Write the model of a run's last round.

    ONNX and TorchScript programs map ``inputs`` (n, C, H, W), normalised as in training, to
    ``logits`` (n, classes), for any n. They are run once, and must give what the model gives.

    Parameters
    ----------
    run : RunFiles
        As :func:`run_to_export` gives it.
    form : str
        ``safetensors`` (weights by name), ``torchscript`` or ``onnx``.
    folder : Path
        Where to; made if absent.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ExportError
        If the format does not hold the model.
    ModelError
        If the model cannot be built here.
    """
    weights = _weights(run)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILES[form]
    if form == "safetensors":
        save_file(weights, file)
        return file
    spec = data_spec_of(run)
    model = create_model(run.settings["model"], spec)
    model.load_state_dict(weights)
    model.eval()
    write, inputs = _WRITERS[form], torch.rand(2, *spec.shape)
    try:
        with warnings.catch_warnings(action="ignore"):  # both are deprecated
            write(model, inputs, file)
    except RuntimeError as error:
        raise ExportError(f"{form} cannot hold {run.settings['model']!r}: {error}") from error
    return _checked(model, torch.rand(5, *spec.shape), form, file)


def data_spec_of(run: RunFiles) -> DataSpec:
    """What a run's model fits, from its files: the data themselves are not needed."""
    spec: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in run.about["spec"].items()
    }
    return DataSpec(**spec)


def _torchscript(model: nn.Module, inputs: Tensor, file: Path) -> None:
    torch.jit.trace(model, inputs).save(file)  # type: ignore[no-untyped-call]


def _onnx(model: nn.Module, inputs: Tensor, file: Path) -> None:
    # The exporter by torch.export knows no adaptive max pooling, which the digits' network has.
    torch.onnx.export(
        model,
        (inputs,),
        file,
        input_names=["inputs"],
        output_names=["logits"],
        dynamic_axes={"inputs": {0: "n"}, "logits": {0: "n"}},
        dynamo=False,
    )


_WRITERS = {"torchscript": _torchscript, "onnx": _onnx}


@torch.inference_mode()
def _checked(model: nn.Module, inputs: Tensor, form: Format, file: Path) -> Path:
    """Keep a file only if it gives the model's logits, on another number of samples too."""
    if form == "torchscript":
        found = torch.jit.load(file)(inputs).numpy()  # type: ignore[no-untyped-call]
    else:
        (found,) = ReferenceEvaluator(str(file)).run(None, {"inputs": inputs.numpy()})
    if not np.allclose(found, model(inputs).numpy(), atol=TOLERANCE):
        file.unlink()
        raise ExportError(
            f"{form} cannot hold {type(model).__name__}: what it gives differs from what the "
            "model gives (export as safetensors)"
        )
    return file


def _weights(run: RunFiles) -> dict[str, Tensor]:
    """The model after the run's last round, from its checkpoint or from the run's end."""
    file = checkpoints(run.folder).get(run.rows[-1]["round"])
    if file is None:
        return load_file(run.folder / MODEL)
    return as_tensors(as_arrays(load_checkpoint(file).arrays))
