"""Ensemble distillation: train a student on the weighted mean of several models' outputs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.distill.errors import DistillError
from flwr_distill.task.evaluation import outputs

Average = Literal["probabilities", "logits"]

HELD_OUT = 0.1
"""Share of the samples that early stopping is judged by, not trained on."""
TINY = 1e-12
"""Added to probabilities, which may be 0."""


@dataclass(frozen=True)
class Distilled:
    """Epochs trained, the epoch of the student kept (0 is untrained), its held-out loss in nats."""

    epochs: int
    best_epoch: int
    loss: float


def teacher_probabilities(
    members: Iterable[tuple[float, nn.Module]],
    inputs: Tensor,
    *,
    average: Average = "probabilities",
    cut: int = 0,
) -> Tensor:
    """Weighted mean of the members' outputs, (n, classes) (FedHEAD, step 4).

    ``sum_k p_k f(x; w_k) / sum_k p_k``, with f the softmax outputs; or the softmax of the mean of
    the logits (as in FedDF). Uses one member at a time, so an iterator may load them one by one.

    Parameters
    ----------
    members : iterable of (float, nn.Module)
        Weight p_k > 0 and model of each member, all on one device; left in evaluation mode.
    inputs : Tensor
        Samples x, (n, ...), on that device or in main memory.
    cut : int (default: 0)
        If > 0, the mean is not weighted and omits that many of the highest and of the lowest
        outputs for each sample and class; all members' outputs are then in memory.

    Raises
    ------
    DistillError
        If there are no samples, no members, or too few to cut.
    """
    if not len(inputs):
        raise DistillError("an ensemble needs at least one sample")
    outputs = (
        (weight, logits if average == "logits" else logits.softmax(dim=1))
        for weight, logits in ((weight, _logits(model, inputs)) for weight, model in members)
    )
    mean = _trimmed_mean([each for _, each in outputs], cut) if cut else _weighted_mean(outputs)
    if average == "logits":
        return mean.softmax(dim=1)
    return mean / mean.sum(dim=1, keepdim=True) if cut else mean


def saving(teacher: Tensor, student: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share, at most 1, of a student's cross-entropy that its teacher saves on labelled samples.

    `teacher` is the output of `teacher_probabilities` on the samples, (n, classes), on the device
    of `student`, which is left in evaluation mode.
    """
    labels = labels.to(teacher.device)
    own = float(functional.cross_entropy(_logits(student, inputs), labels))
    return 1 - float(functional.nll_loss((teacher + TINY).log(), labels)) / max(own, TINY)


def distil_ensemble(
    student: nn.Module,
    inputs: Tensor,
    teacher: Tensor,
    *,
    epochs: int = 20,
    patience: int = 5,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    batch_size: int = 128,
    restore_best: bool = True,
    generator: torch.Generator,
) -> Distilled:
    """Train a student on a teacher's outputs, with early stopping (FedHEAD, step 4; FedHEAD+).

    Adam minimises ``KL(teacher || student)``, averaged over samples: eq. 4 with cross-entropy, less
    the teacher's entropy, which no student changes. A tenth of the samples (at least one) is held
    out to stop early by; which ones the paper takes it does not say. A single sample serves as both
    parts.

    Parameters
    ----------
    student : nn.Module
        Trained in place, on the device of `teacher`. Left in evaluation mode.
    inputs, teacher : Tensor
        Samples (n, ...), on that device or in main memory, and `teacher_probabilities` of them.
    epochs, patience : int (default: 20, 5)
        Maximum passes over the samples (n_s on a leader, n_g on the server), and epochs without
        improvement before training stops.
    batch_size : int (default: 128)
        A last minibatch of one sample is skipped, as in local training.
    restore_best : bool (default: True)
        Whether the student with the lowest held-out loss is kept, which may be the untrained one;
        else that of the last epoch.
    generator : torch.Generator
        For the held-out part and minibatches, on the CPU.

    Raises
    ------
    DistillError
        If there are no samples, or the teacher's rows do not match them.
    """
    if not len(inputs) or len(teacher) != len(inputs):
        raise DistillError(
            f"distillation needs samples and a teacher's output for each of {len(inputs)}",
            where="teacher's outputs",
            value=len(teacher),
        )
    order = torch.randperm(len(inputs), generator=generator)
    num_held_out = max(1, int(HELD_OUT * len(inputs)))
    order, device = order.to(inputs.device), teacher.device
    held_out = order[:num_held_out]
    held_out_teacher = teacher[held_out.to(device)]
    training = order[num_held_out:] if len(inputs) > 1 else order
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, weight_decay=weight_decay)

    best_epoch, best = 0, _snapshot(student)
    loss = lowest = _held_out_loss(student, inputs[held_out], held_out_teacher)
    epoch = 0
    for epoch in range(1, epochs + 1):
        student.train()
        for batch in _batches(training, batch_size, generator):
            optimizer.zero_grad(set_to_none=True)
            logits = student(inputs[batch].to(device, non_blocking=True))
            target = teacher[batch.to(device, non_blocking=True)]
            _divergence(logits, target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        loss = _held_out_loss(student, inputs[held_out], held_out_teacher)
        if loss < lowest:
            best_epoch, best, lowest = epoch, _snapshot(student), loss
        elif epoch - best_epoch >= patience:
            break
    if restore_best:
        student.load_state_dict(best)
    else:
        best_epoch, lowest = epoch, loss
    student.eval()
    return Distilled(epochs=epoch, best_epoch=best_epoch, loss=lowest)


def _weighted_mean(outputs: Iterable[tuple[float, Tensor]]) -> Tensor:
    mean: Tensor | float = 0.0
    total = 0.0
    for weight, each in outputs:
        mean = mean + weight * each
        total += weight
    if not isinstance(mean, Tensor):
        raise DistillError("an ensemble needs at least one member")
    return mean / total


def _trimmed_mean(outputs: list[Tensor], cut: int) -> Tensor:
    if len(outputs) <= 2 * cut:
        raise DistillError(
            f"twice as many exceed an ensemble of {len(outputs)}", where="cut", value=cut
        )
    return torch.stack(outputs).sort(dim=0).values[cut : len(outputs) - cut].mean(dim=0)


def _divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), mean over samples."""
    return functional.kl_div(logits.log_softmax(dim=1), teacher, reduction="batchmean")


def _held_out_loss(student: nn.Module, inputs: Tensor, teacher: Tensor) -> float:
    return float(_divergence(_logits(student, inputs), teacher))


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    return outputs(model.eval(), inputs, next(model.parameters(), inputs).device)


def _batches(indices: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    permutation = torch.randperm(len(indices), generator=generator)
    order = indices[permutation.to(indices.device, non_blocking=True)]
    if len(order) % batch_size == 1 and min(len(order), batch_size) > 1:
        order = order[:-1]
    return iter(torch.split(order, batch_size))


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
