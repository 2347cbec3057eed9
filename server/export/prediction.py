"""Uses an exported model: from an image file or a table to the probability of each class."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from flwr_distill.protocol.meeting import one_line
from flwr_distill.server.export.description import KEY, Description
from flwr_distill.task.datasets import load_inputs
from flwr_distill.task.datasets.images import read_image
from flwr_distill.task.datasets.types import normalise
from flwr_distill.task.errors import ReportedError


class ModelFileError(ReportedError):
    """The file is no exported model, or one that cannot be used here."""


@dataclass(frozen=True)
class ExportedModel:
    """A model from a file."""

    description: Description  # its inputs and classes
    logits: Callable[[Tensor], Tensor]  # maps inputs (n, C, H, W) to logits (n, classes)

    def predictions(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """Name of each sample in a file, and the probability of each class, (classes,).

        An image file has one sample, a table one in each row. Raises DatasetError if unreadable.
        """
        if self.description.spec.kind == "image":
            yield str(file), self.probabilities(file)
            return
        for number, probabilities in enumerate(self._of_rows(file), start=1):
            yield f"{file}, row {number}", probabilities

    @torch.inference_mode()
    def _of_rows(self, file: Path) -> Tensor:
        spec = self.description.spec
        inputs = normalise(load_inputs(file, spec), spec)
        return torch.softmax(self.logits(inputs).double(), dim=1)

    @torch.inference_mode()
    def probabilities(self, image: Path) -> Tensor:
        """Probability of each class for an image file, (classes,).

        The image gets the model's channels and size, as on nodes. Raises UnusableFileError if it is
        unreadable, DatasetError if its reader needs a missing package.
        """
        spec = self.description.spec
        inputs = normalise(read_image(image, spec)[None], spec)
        return torch.softmax(self.logits(inputs)[0].double(), dim=0)


def read_model(file: Path) -> ExportedModel:
    """Read what :func:`server.export.model.export_model` wrote: the suffix tells the format.

    ONNX and safetensors files are data alone. A TorchScript file is a program that runs here.

    Raises ModelFileError if it is no such file, or its model cannot be built or used here.
    """
    if not file.is_file():
        raise ModelFileError("there is no such file", where=file, remedy=_REMEDY)
    if file.suffix not in _READERS:
        problem = f"a model's name ends in {', '.join(_READERS)}, got {file.suffix or 'none'!r}"
        raise ModelFileError(problem, where=file, remedy=_REMEDY)
    try:
        model = _READERS[file.suffix](file)
    except (DecodeError, RuntimeError, SafetensorError, ValueError) as error:
        reason = one_line(error) or type(error).__name__
        problem = f"not a model that can be used here: {reason}"
        raise ModelFileError(problem, where=file) from error
    if (kind := model.description.spec.kind) == "text":
        problem = f"its inputs are of kind {kind}; only images and tables can be predicted"
        raise ModelFileError(problem, where=file)
    return model


def _read_onnx(file: Path) -> ExportedModel:
    program = onnx.load(file)
    description = _described({entry.key: entry.value for entry in program.metadata_props})
    session = ReferenceEvaluator(program)

    def logits_of(inputs: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"inputs": inputs.numpy()})
        return torch.from_numpy(logits)

    return ExportedModel(description, logits_of)


def _read_torchscript(file: Path) -> ExportedModel:
    metadata = {KEY: ""}
    program = torch.jit.load(file, "cpu", _extra_files=metadata)  # type: ignore[no-untyped-call]
    return ExportedModel(_described(metadata), program.eval())


def _read_safetensors(file: Path) -> ExportedModel:
    with safe_open(file, "pt") as weights:
        description = _described(weights.metadata() or {})
    if description.is_code:  # a file does not choose the code that is imported
        raise ValueError(
            f"its architecture is code of your own, {description.architecture!r}; export it with "
            "--format onnx, which needs no code"
        )
    model = description.build()
    model.load_state_dict(load_file(file))
    return ExportedModel(description, model.eval())


_READERS = {".onnx": _read_onnx, ".pt": _read_torchscript, ".safetensors": _read_safetensors}
_REMEDY = "flwr-distill runs export RUN --format onnx writes one"


def _described(metadata: dict[str, str]) -> Description:
    if not metadata.get(KEY):
        raise ValueError(f"it does not say what its inputs are; {_REMEDY}, from the run")
    return Description.from_json(metadata[KEY])
