"""Exports a run's model as safetensors, TorchScript or ONNX."""

import warnings
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file, save
from torch import Tensor, nn

from flwr_distill.base.files import replacing
from flwr_distill.protocol.arrays import as_arrays, as_tensors
from flwr_distill.protocol.meeting import one_line
from flwr_distill.server.export.description import KEY, Description
from flwr_distill.server.page.method import method_of_run
from flwr_distill.server.page.numbers import best, best_metric
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.record.frozen import load_frozen
from flwr_distill.task.errors import ReportedError

MODEL = "model.safetensors"
Format = Literal["safetensors", "torchscript", "onnx"]
FILES: dict[Format, str] = {
    "safetensors": MODEL,
    "torchscript": "model.pt",
    "onnx": "model.onnx",
}
TOLERANCE = 1e-3
_OTHERS = "flwr-distill runs list shows other runs"


class ExportError(ReportedError):
    """The run has no model, or the format cannot hold it."""


def run_to_export(run: RunFiles, best_round: bool = False) -> RunFiles:
    """The run up to the round whose model is exported: the last or the most accurate one.

    Raises ExportError if that round has no checkpoint, or the run no global model.
    """
    if (method := method_of_run(run)) and method.outcome == "personal":
        raise ExportError(
            f"nodes keep models of their own under strategy = {method.name!r}, and there is no "
            "global one to export",
            where=run.folder,
        )
    if run.evaluated:
        raise ExportError(
            "it has evaluated a model, and trained none",
            where=run.folder,
            remedy=f"take that one, {run.settings['evaluate']['model']}",
        )
    rounds = set(checkpoints(run.folder))
    if (run.folder / MODEL).exists() and run.rows:
        rounds.add(run.rows[-1]["round"])
    peak = best(run.rows, best_metric(run))
    wanted = peak["round"] if best_round and peak else max(rounds, default=None)
    if wanted not in rounds or "spec" not in run.about:
        raise ExportError(
            f"it has no model of that round, but of {sorted(rounds)}",
            where=run.folder,
            remedy=_OTHERS,
        )
    if not any(rounds) and not run.settings.get("start"):
        raise ExportError(
            "it has no model yet, only the random one of its start",
            where=run.folder,
            remedy=f"wait for the end of round 1; {_OTHERS}",
        )
    return replace(run, rows=[row for row in run.rows if row["round"] <= wanted])


def export_model(run: RunFiles, form: Format, folder: Path) -> Path:
    """Write the model of a run's last round into `folder`; return the file.

    ONNX and TorchScript programs map ``inputs`` (n, C, H, W), normalised as in training, to
    ``logits`` (n, classes), for any n. Each is run once and must give the model's logits. Every
    file describes its inputs and classes, for :func:`server.export.prediction.read_model`.

    Raises ExportError if the format cannot hold the model, and ModelError if it cannot be built
    here.
    """
    return write_model(weights_of(run), Description.of(run), form, folder / FILES[form])


def write_model(
    weights: dict[str, Tensor], description: Description, form: Format, file: Path
) -> Path:
    """Write a model; see `export_model`. Where that fails, a file from before stays as it was.

    OSError names the file if it cannot be written.
    """
    # In memory first: PyTorch aborts the process where a file of its own finds no room.
    content = _content(weights, description, form)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    return file


def _content(weights: dict[str, Tensor], description: Description, form: Format) -> bytes:
    """The bytes of a model file."""
    metadata = {KEY: description.to_json()}
    if form == "safetensors":
        return save(weights, metadata)
    shape = description.spec.shape
    model = description.build()
    model.load_state_dict(weights)
    model.eval()
    make, inputs = _MAKERS[form], torch.rand(2, *shape)
    try:
        with warnings.catch_warnings(action="ignore"):  # both are deprecated
            content = make(model, inputs, metadata)
    except RuntimeError as error:
        problem = f"{form} cannot hold it: {one_line(error)}"
        raise ExportError(problem, where="model", value=description.architecture) from error
    _check(model, torch.rand(5, *shape), form, content)
    return content


def _torchscript(model: nn.Module, inputs: Tensor, metadata: dict[str, str]) -> bytes:
    program, content = torch.jit.trace(model, inputs), BytesIO()  # type: ignore[no-untyped-call]
    torch.jit.save(program, content, metadata)
    return content.getvalue()


def _onnx(model: nn.Module, inputs: Tensor, metadata: dict[str, str]) -> bytes:
    # The newer exporter (dynamo=True) has no adaptive max pooling, which the digits' network uses.
    content = BytesIO()
    torch.onnx.export(
        model,
        (inputs,),
        content,  # type: ignore[arg-type]  # the older exporter takes it
        input_names=["inputs"],
        output_names=["logits"],
        dynamic_axes={"inputs": {0: "n"}, "logits": {0: "n"}},
        dynamo=False,
    )
    program = onnx.load_from_string(content.getvalue())
    onnx.helper.set_model_props(program, metadata)
    return bytes(program.SerializeToString())


_MAKERS = {"torchscript": _torchscript, "onnx": _onnx}


@torch.inference_mode()
def _check(model: nn.Module, inputs: Tensor, form: Format, content: bytes) -> None:
    """Raise ExportError unless a program gives the model's logits, for another batch size too."""
    if form == "torchscript":
        program = torch.jit.load(BytesIO(content))  # type: ignore[no-untyped-call]
        logits = program(inputs).numpy()
    else:
        program = onnx.load_from_string(content)
        (logits,) = ReferenceEvaluator(program).run(None, {"inputs": inputs.numpy()})
    if not np.allclose(logits, model(inputs).numpy(), atol=TOLERANCE):
        raise ExportError(
            f"{form} cannot hold it: the program's outputs differ from the model's",
            where=type(model).__name__,
            remedy="export as safetensors",
        )


def weights_of(run: RunFiles) -> dict[str, Tensor]:
    """The model after the run's last round, from its checkpoint or the final model file."""
    file = checkpoints(run.folder).get(run.rows[-1]["round"])
    if file is None:
        return load_file(run.folder / MODEL)
    return load_frozen(run.folder) | as_tensors(as_arrays(load_checkpoint(file).arrays))
