"""Evaluates the global model on the server's test samples."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from flwr_distill.protocol.arrays import as_arrays, as_tensors
from flwr_distill.task.backbones import Frozen
from flwr_distill.task.datasets import Samples
from flwr_distill.task.evaluation import outputs, predict


def server_evaluation(
    model: nn.Module, test: Samples, device: torch.device | str = "cpu"
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Build what evaluates a round's model; overwrites the weights of `model`.

    It returns ``accuracy`` in [0, 1], ``loss`` (mean cross-entropy, nats) and ``class-accuracy``, a
    list with NaN for classes without samples.
    """
    labels = test.labels.cpu()
    class_sizes = labels.bincount()
    samples = test

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal samples
        model.load_state_dict(as_tensors(as_arrays(arrays)))
        if samples is test and isinstance(model, Frozen) and not model.trained:
            samples = _as_vectors(model, test, device)  # once: they do not change
        predicted, loss = predict(model, samples, device)
        correct = predicted == labels
        hits = labels[correct].bincount(minlength=len(class_sizes))
        return MetricRecord(
            {
                "accuracy": int(correct.sum()) / len(correct),
                "loss": loss,
                "class-accuracy": (hits.double() / class_sizes).tolist(),
            }
        )

    return evaluate


def _as_vectors(model: Frozen, samples: Samples, device: torch.device | str) -> Samples:
    model.to(device).eval()
    return Samples(outputs(model.vectors, samples.inputs, device), samples.labels)
