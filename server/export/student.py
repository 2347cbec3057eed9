"""Distils a run's model into a smaller one, on any images."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.distill.ensemble import distil_ensemble
from flwr_distill.server.export.description import Description
from flwr_distill.server.export.model import FILES, ExportError, Format, weights_of, write_model
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.task.backbone_settings import BackboneSettings
from flwr_distill.task.backbones import whole_state
from flwr_distill.task.datasets import auxiliary_images
from flwr_distill.task.evaluation import outputs
from flwr_distill.task.models import create_model

SHARPNESS = 2.0
"""Deviation of the logits to learn from: those of least squares are flat."""
EPOCHS = 60
LR = 3e-3
BATCH = 64


@dataclass(frozen=True)
class Student:
    """A small model, and what it learns on."""

    model: str  # its architecture, as in the setting ``model``
    samples: str  # images without labels; see `task.datasets.auxiliary_images`
    size: int  # their number
    data_root: str = ""  # folder of named sets; empty for the default


def export_student(run: RunFiles, student: Student, form: Format, folder: Path) -> tuple[Path, str]:
    """Distil the model of a run's last round into a student, and write that beside it.

    The student learns on images without labels. Its loss is the divergence of its probabilities
    from the model's, with the model's logits scaled to one deviation.

    Returns the file, and how well the student learnt, for the user. Raises ExportError if the run's
    inputs are no images or the format cannot hold the student; DatasetError or ModelError if images
    or model are unavailable.
    """
    description = Description.of(run)
    spec, seed = description.spec, int(run.settings["seed"])
    if spec.kind != "image":
        problem = f"a student learns on images, and inputs are {spec.kind}s"
        raise ExportError(problem, where=run.folder)
    teacher = description.build()
    teacher.load_state_dict(weights_of(run))
    inputs = auxiliary_images(student.samples, spec, student.size, seed, student.data_root or None)
    model = create_model(student.model, spec, seed=seed)
    agreement = distil(teacher, model, inputs, seed)
    small = replace(description, model=student.model, backbone=BackboneSettings())
    file = folder / f"student-{FILES[form]}"
    return write_model(whole_state(model), small, form, file), agreement


def distil(teacher: nn.Module, student: nn.Module, inputs: Tensor, seed: int) -> str:
    """Train a student, in place, on a model's outputs for unlabelled inputs (n, ...)."""
    logits = outputs(teacher.eval(), inputs, "cpu")
    targets = functional.softmax(SHARPNESS * logits / logits.std(1, keepdim=True).mean(), dim=1)
    generator = torch.Generator().manual_seed(seed)
    distil_ensemble(
        student,
        inputs,
        targets,
        epochs=EPOCHS,
        patience=EPOCHS,
        lr=LR,
        batch_size=BATCH,
        generator=generator,
    )
    alike = (outputs(student.eval(), inputs, "cpu").argmax(1) == logits.argmax(1)).float().mean()
    return f"it agrees with the model on {alike:.0%} of the {len(inputs)} images"
