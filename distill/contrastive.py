"""Losses that align features by class: supervised contrastive (Khosla et al. 2020), and MMD."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

TEMPERATURE = 0.07


def supervised_contrastive_loss(
    features: Tensor,
    labels: Tensor,
    temperature: float = TEMPERATURE,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Mean over anchors of how unlikely their positives are (FedLGD eq. 4, which is a sum).

    For an anchor j with positives P(j), the other samples of its class: ``-1/|P(j)| sum_{p in P(j)}
    log(exp(f_j f_p / temperature) / sum_{a != j} exp(f_j f_a / temperature))``, with features (n,
    d) scaled to unit length and labels int64 (n,). Anchors without a positive do not count; 0 if
    none has one. The default temperature is that of the published codes (SupCon, FedLGD).
    """
    unit = functional.normalize(features, dim=1)
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similarity = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    log_likelihood = similarity.log_softmax(dim=1)
    positive = (labels[:, None] == labels) & ~itself
    num_positives = positive.sum(dim=1)
    of_positives = log_likelihood.masked_fill(~positive, 0.0).sum(dim=1)
    losses = -of_positives / num_positives.clamp(min=1)  # 0 without a positive
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (num_positives > 0).sum().clamp(min=1)


def mean_discrepancy(features: Tensor, labels: Tensor, others: Tensor, of_others: Tensor) -> Tensor:
    """Squared distance of mean features, summed over the classes that both sets have; a scalar.

    The maximum mean discrepancy of FedLGD's eq. 1 between two sets of features, (n, d) and (m, d),
    with their labels, int64 (n,) and (m,).
    """
    classes = max(int(labels.max()), int(of_others.max())) + 1
    means = [_class_means(x, y, classes) for x, y in ((features, labels), (others, of_others))]
    in_both = (labels.bincount(minlength=classes) > 0) & (of_others.bincount(minlength=classes) > 0)
    return (means[0] - means[1])[in_both].square().sum()


def _class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    belongs = functional.one_hot(labels, classes).to(features.dtype)
    return belongs.T @ features / belongs.sum(0).clamp(min=1)[:, None]
