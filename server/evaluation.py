"""Evaluation of the global model on the server's own test samples, once a round."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from protocol.arrays import as_arrays, as_tensors
from task.datasets import Samples
from task.evaluation import predict


def server_evaluation(
    model: nn.Module, test: Samples, device: torch.device | str = "cpu"
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Build the ``evaluate_fn`` of Flower's ``Strategy.start``.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are overwritten each time.
    test : Samples
        What to evaluate on.
    device : torch.device or str (default: "cpu")
        Where to compute.

    Returns
    -------
    Callable[[int, ArrayRecord], MetricRecord]
        Gives ``accuracy`` in [0, 1], ``loss`` (mean cross-entropy, nats) and ``class-accuracy``, a
        list with NaN for classes without samples.
    """
    labels = test.labels.cpu()
    of_class = labels.bincount()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(as_tensors(as_arrays(arrays)))
        predicted, loss = predict(model, test, device)
        correct = predicted == labels
        hits = labels[correct].bincount(minlength=len(of_class))
        return MetricRecord(
            {
                "accuracy": int(correct.sum()) / len(correct),
                "loss": loss,
                "class-accuracy": (hits.double() / of_class).tolist(),
            }
        )

    return evaluate
