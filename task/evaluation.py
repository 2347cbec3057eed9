"""Passes over many samples in bounded memory; accuracy and loss of a classifier."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.compute.memory_format import in_fast_format
from flwr_distill.task.datasets import Samples

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
    model.to(device).eval()  # not in inference mode: its buffers could not be loaded again
    predicted, loss = [], torch.zeros((), dtype=torch.float64, device=device)
    with in_fast_format(model) as memory_format, torch.inference_mode():
        parts = (torch.split(part, BATCH) for part in (samples.inputs, samples.labels))
        for inputs, labels in zip(*parts, strict=True):
            logits = model(inputs.to(device).contiguous(memory_format=memory_format))
            predicted.append(logits.argmax(dim=1))
            loss += functional.cross_entropy(logits, labels.to(device), reduction="sum")
        return torch.cat(predicted).cpu(), float(loss) / len(samples)
