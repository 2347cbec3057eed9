"""Weights of classes in the cross-entropy of local training (``train.class-weights``)."""

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import BALANCED, NO_WEIGHTS, stated_weights


def class_weights(setting: str, labels: Tensor) -> Tensor | None:
    """Weights by label, float32, on the device of the labels; None for no weights.

    Parameters
    ----------
    setting : str
        ``none``, ``balanced`` (the number of samples over that of classes with samples, over that
        of the class: mean 1 over the samples), or numbers.
    labels : Tensor
        Of all samples trained on: int64 (n,), or soft labels (n, classes), which count by share.

    Raises
    ------
    SettingsError
        If the setting has no number for a label.
    """
    if setting == NO_WEIGHTS:
        return None
    counts = labels.double().sum(0) if labels.ndim == 2 else labels.bincount().double()
    if setting == BALANCED:
        present = counts > 0
        weights = torch.where(present, len(labels) / (present.sum() * counts), 0.0)
        return weights.float()
    stated = torch.tensor(stated_weights(setting), device=labels.device)
    if len(counts) > len(stated):
        raise SettingsError(
            f"has no number for label {len(counts) - 1}",
            where="train.class-weights",
            value=setting,
            remedy="give one for each class",
        )
    return stated


def mean_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over samples of their cross-entropy times the weight of their class.

    The sum is over as many samples as there are, not over their weights: each sample's gradient is
    then its own, as DP-SGD needs it. A soft label has the mean of the weights, by share.
    """
    if weights is None:
        return functional.cross_entropy(logits, labels)
    own = labels @ weights[: labels.shape[1]] if labels.ndim == 2 else weights[labels]
    return (own * functional.cross_entropy(logits, labels, reduction="none")).mean()
