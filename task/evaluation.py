"""Accuracy and loss of a classifier on a set of samples."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.datasets import Samples

BATCH_SIZE = 1024


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
    with torch.inference_mode():
        for start in range(0, len(samples), BATCH_SIZE):
            inputs = samples.inputs[start : start + BATCH_SIZE].to(device)
            labels = samples.labels[start : start + BATCH_SIZE].to(device)
            logits = model(inputs)
            predicted.append(logits.argmax(dim=1))
            loss += functional.cross_entropy(logits, labels, reduction="sum")
        return torch.cat(predicted).cpu(), float(loss) / len(samples)
