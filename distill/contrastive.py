"""Supervised contrastive loss (Khosla et al. 2020): features of a class together, others apart."""

import torch
from torch import Tensor
from torch.nn import functional

TEMPERATURE = 0.07


def supervised_contrastive_loss(
    features: Tensor, labels: Tensor, temperature: float = TEMPERATURE
) -> Tensor:
    """Mean over anchors of how unlikely their positives are (FedLGD eq. 2-4).

    For an anchor j with positives P(j), the other samples of its class: ``-1/|P(j)| sum_{p in P(j)}
    log(exp(f_j f_p / temperature) / sum_{a != j} exp(f_j f_a / temperature))``, with features (n,
    d) scaled to unit length and labels int64 (n,). The mean is over anchors with a positive; 0 if
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
    return losses.sum() / (num_positives > 0).sum().clamp(min=1)
