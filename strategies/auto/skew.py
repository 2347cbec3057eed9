"""How much the labels of nodes differ, by soft labels alone."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.evaluation import outputs

Floats = NDArray[np.floating]

TINY = 1e-12
"""Added to probabilities, which may be 0."""


def label_skew(soft_labels: Sequence[Floats], one_class: Sequence[Floats]) -> float:
    """How much the labels of nodes differ: 0 if they are alike, about 1 with one class a node.

    A few gradient steps move a model's mean log-probabilities, on any inputs, towards the classes
    that it was trained on, in proportion to their shares. The median distance between two nodes is
    given in units of the median distance between two models that saw one class each. A median is
    right if fewer than a quarter of the nodes lie.

    Soft labels are those of two or more nodes, (samples, classes) each; and `one_class_labels`.
    """
    return _median_distance(soft_labels) / _median_distance(one_class)


def one_class_labels(
    model: nn.Module, auxiliary: Tensor, num_classes: int, *, steps: int, lr: float, batch_size: int
) -> list[Floats]:
    """Soft labels as nodes with one class each would give them, without their data.

    Samples without labels stand for the nodes' own, and all get the same label: how far a few steps
    move a model depends on the scale of its inputs, hardly on what they show.

    Given the initial model, which is not changed, and auxiliary samples, on one device; steps of
    SGD as on nodes. Returns for each class (samples, classes).
    """
    return [
        _labels_of_one_class(copy.deepcopy(model), auxiliary, label, steps, lr, batch_size)
        for label in range(num_classes)
    ]


def _labels_of_one_class(
    model: nn.Module, auxiliary: Tensor, label: int, steps: int, lr: float, batch_size: int
) -> Floats:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    batches = torch.split(auxiliary, batch_size)
    for step in range(steps):
        inputs = batches[step % len(batches)]
        labels = torch.full((len(inputs),), label, device=inputs.device)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    logits = outputs(model.eval(), auxiliary, auxiliary.device)
    return functional.softmax(logits, dim=1).cpu().numpy()


def _median_distance(soft_labels: Sequence[Floats]) -> float:
    logs = np.stack(
        [np.log(labels.astype(np.float64) + TINY).mean(axis=0) for labels in soft_labels]
    )
    centred = torch.from_numpy(logs - logs.mean(axis=1, keepdims=True))
    return float(functional.pdist(centred).median())
