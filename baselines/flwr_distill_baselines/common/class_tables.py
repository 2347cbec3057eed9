"""Means over the node's samples of each class, and the federation's as a table."""

from collections.abc import Callable, Mapping

import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.nn import functional

from flwr_distill.protocol.arrays import as_arrays, as_tensors
from flwr_distill.task.datasets import Samples
from flwr_distill.task.evaluation import BATCH
from flwr_distill_baselines.common.class_means import CLASSES, COUNTS


def means_by_class(
    outputs: Callable[[Tensor], Mapping[str, Tensor]],
    samples: Samples,
    num_classes: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Means of named outputs (n, d) over the samples of each class, on the CPU.

    Returns labels of the classes at hand and their samples, int64 (k,); each mean, float32 (k, d).
    """
    counts = torch.bincount(samples.labels.cpu(), minlength=num_classes)
    present = counts.nonzero().flatten()
    sums: dict[str, Tensor] = {}
    with torch.inference_mode():
        for rows in torch.split(torch.arange(len(samples)), BATCH):
            inputs, labels = samples.minibatch(rows.to(samples.labels.device), device)
            members = functional.one_hot(labels, num_classes).T.double()
            for name, values in outputs(inputs).items():
                total = (members @ values.double()).cpu()  # index_add_ has no order on a GPU
                sums[name] = sums[name] + total if name in sums else total
    means = {name: (total[present] / counts[present, None]).float() for name, total in sums.items()}
    return {CLASSES: present, COUNTS: counts[present], **means}


def table(
    record: ArrayRecord, name: str, num_classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The server's means (k, d) as a table, float32 (num_classes, d), and which classes are known.

    Rows of other classes are 0.
    """
    arrays = as_tensors(as_arrays(record))
    means, labels = arrays[name], arrays[CLASSES]
    rows = means.new_zeros(num_classes, means.shape[1])
    rows[labels] = means
    known = torch.zeros(num_classes, dtype=torch.bool)
    known[labels] = True
    return rows.to(device), known.to(device)
