"""CADIS on nodes: a regulariser that keeps relations between samples near the global model's."""

import copy
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm
from flwr_distill.task.settings import Kernel, TrainSettings

MIN_VARIANCE = 1e-12
ADDED_VARIANCE = 0.001
"""Of the published kernel."""


class Relational(LossTerm):
    """``lambda KL(p_T || p_S)`` between the relations in a minibatch (CADIS, eq. 18-20).

    Relations are ``p_{j|i} = K(f_i, f_j) / sum_{k != i} K(f_i, f_k)`` over a model's features f,
    those of the global model of the round for p_T and of the model in training for p_S; the
    divergence is summed over i. A minibatch of one or two samples has no relations to keep, and
    the term is 0.

    Parameters
    ----------
    model : nn.Module
        In training; now it is the teacher.
    weight : float
        lambda.
    layer : str (default: "")
        Name of the dense layer whose input are the features; see :func:`task.models.last_dense`.
    kernel : str (default: "gaussian")
        K; see :func:`log_relations`.
    """

    def __init__(
        self, model: nn.Module, weight: float, layer: str = "", kernel: Kernel = "gaussian"
    ) -> None:
        self._teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self._teachers = Features(self._teacher, layer)
        self._students = Features(model, layer)
        self._weight = weight
        self._kernel = kernel

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term, weighted by ``kd-lambda``."""
        return cls(model, settings.kd_lambda, settings.feature_layer, settings.kd_kernel)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on labels."""
        self._teacher(inputs)
        teacher = log_relations(self._teachers.last.flatten(1), self._kernel)
        student = log_relations(self._students.last.flatten(1), self._kernel)
        return self._weight * functional.kl_div(student, teacher, reduction="sum", log_target=True)


def log_relations(features: Tensor, kernel: Kernel = "gaussian") -> Tensor:
    """Logarithms of ``p_{j|i}`` over a minibatch (CADIS, eq. 18-19).

    With d the distances of the minibatch, K is

    - ``gaussian``: ``exp(-d_ij^2 / (2 v))`` as in the paper, which leaves v open. Here it is the
      mean of d^2, so that the scale of features does not matter.
    - ``centred``: ``exp(-(d_ij - mean d)^2 / (2 (std(d)^2 + 0.001)))`` as in the published code.

    Features are (n, d), the result (n, n - 1): row i has the other samples in order, without i.
    """
    n = len(features)
    exact = "donot_use_mm_for_euclid_dist"  # equal features are at distance 0
    distances = torch.cdist(features, features, compute_mode=exact)
    # Without the diagonal: past the first entry, it is the last of every n + 1.
    distances = distances.flatten()[1:].reshape(n - 1, n + 1)[:, :-1].reshape(n, n - 1)
    if kernel == "centred":
        squared = (distances - distances.mean()).square()
        variance = distances.var() + ADDED_VARIANCE
    else:
        squared = distances.square()
        variance = squared.mean().clamp(min=MIN_VARIANCE)
    return functional.log_softmax(-squared / (2 * variance), dim=1)
