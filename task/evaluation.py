"""Passes over many samples in bounded memory; accuracy, loss and counts of a classifier."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.compute.memory_format import in_fast_format
from flwr_distill.task.datasets import Samples
from flwr_distill.task.scores import BINS, CALIBRATION_BINS, LOG_ODDS, UNIT, Counts, size

COUNTED = 2**16
"""Logits that are counted at once: for each minibatch alone it would take a tenth of a small
model's time."""
BATCH = 64
"""Samples of a forward pass. More need gigabytes for 1,000 images of 64 x 64, and are no faster on
a CPU, whose caches they leave."""


def outputs(
    model: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device | str
) -> Tensor:
    """Pass samples (n, ...), n >= 1, on any device through a model on `device`, without gradients.

    A module must be in evaluation mode, or batches matter.
    """
    with torch.no_grad():  # not inference mode: what it makes could not be trained on
        return torch.cat([model(batch.to(device)) for batch in torch.split(inputs, BATCH)])


def evaluate_model(
    model: nn.Module, samples: Samples, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Accuracy in [0, 1] and mean cross-entropy in nats; leaves the model in evaluation mode."""
    predicted, loss = predict(model, samples, device)
    return int((predicted == samples.labels.cpu()).sum()) / len(samples), loss


def predict(
    model: nn.Module, samples: Samples, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Predict the class of each sample, int64 (n,) on the CPU; also the mean cross-entropy in nats.

    The model maps (n, C, H, W) to logits (n, classes) and stays on ``device`` in evaluation mode.
    """
    predicted, loss = [], torch.zeros((), dtype=torch.float64, device=device)
    for logits, labels in _passes(model, samples, device):
        predicted.append(logits.argmax(dim=1))
        loss += functional.cross_entropy(logits, labels, reduction="sum")
    return torch.cat(predicted).cpu(), float(loss) / len(samples)


def count(
    model: nn.Module, samples: Samples, device: torch.device | str = "cpu"
) -> tuple[Counts, float]:
    """Count a model's predictions on samples, n >= 1; also the mean cross-entropy in nats.

    The model is as for `predict`. Counts stay on the device until the end.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    total, waiting = torch.zeros(0, dtype=torch.int64, device=device), list[tuple[Tensor, Tensor]]()
    for logits, labels in _passes(model, samples, device):
        loss += functional.cross_entropy(logits, labels, reduction="sum")
        waiting.append((logits, labels))
        if len(waiting) * logits.numel() >= COUNTED:
            total = _with_counts(total, waiting)
            waiting = []
    total = _with_counts(total, waiting)
    return Counts.from_vector(total.cpu().numpy(), logits.shape[1]), float(loss) / len(samples)


def _with_counts(total: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A vector of all counts, empty at first, with those of further minibatches."""
    if not parts:
        return total
    logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    if not len(total):
        total = total.new_zeros(size(logits.shape[1]))
    add_counts(total, logits, labels)
    return total


def add_counts(total: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add the counts of a minibatch to a vector of all counts (`scores.Counts`), in place.

    A logit that is no number has the lowest probability.
    """
    (n, classes), device = logits.shape, logits.device
    log_p = logits.double().log_softmax(1)
    log_odds = log_p - (-log_p.expm1()).log() + math.log(max(classes - 1, 1))  # over chance
    place = log_odds.nan_to_num(-LOG_ODDS, LOG_ODDS, -LOG_ODDS).asinh() / math.asinh(LOG_ODDS)
    bins = ((place + 1) * BINS / 2).long().clamp(0, BINS - 1)
    columns = torch.arange(classes, device=device)
    is_other = (columns != labels.unsqueeze(1)).long()
    histogram = classes**2 + is_other * classes * BINS + columns * BINS + bins
    confidence = log_p.max(1).values.exp().nan_to_num(0)
    sure = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    sure += size(classes) - 3 * CALIBRATION_BINS
    predicted, one = logits.argmax(1), torch.ones((), dtype=torch.int64, device=device)
    for where, what in (
        (labels * classes + predicted, one.expand(n)),
        (histogram.flatten(), one.expand(n * classes)),
        (sure, one.expand(n)),
        (sure + CALIBRATION_BINS, (confidence * UNIT).round().long()),
        (sure + 2 * CALIBRATION_BINS, (predicted == labels).long()),
    ):
        total.scatter_add_(0, where, what)


def _passes(
    model: nn.Module, samples: Samples, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of minibatches, on the device."""
    model.to(device).eval()  # not in inference mode: its buffers could not be loaded again
    with in_fast_format(model) as memory_format:
        parts = (torch.split(part, BATCH) for part in (samples.inputs, samples.labels))
        for inputs, labels in zip(*parts, strict=True):
            with torch.inference_mode():  # not around the yield: the caller would be in it, too
                logits = model(inputs.to(device).contiguous(memory_format=memory_format))
            yield logits, labels.to(device)
