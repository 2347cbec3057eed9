"""CADIS on nodes: a regulariser that keeps relations between samples near the global model's."""

import copy
from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm
from flwr_distill.task.settings import TrainSettings

MIN_VARIANCE = 1e-12


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
    """

    def __init__(self, model: nn.Module, weight: float, layer: str = "") -> None:
        self._teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self._teachers = Features(self._teacher, layer)
        self._students = Features(model, layer)
        self._weight = weight

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term, weighted by ``kd-lambda``."""
        return cls(model, settings.kd_lambda, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on labels."""
        self._teacher(inputs)
        teacher = log_relations(self._teachers.last.flatten(1))
        student = log_relations(self._students.last.flatten(1))
        return self._weight * functional.kl_div(student, teacher, reduction="sum", log_target=True)


def log_relations(features: Tensor) -> Tensor:
    """Logarithms of ``p_{j|i}`` over a minibatch (CADIS, eq. 19-20).

    ``K(a, b) = exp(-||a - b||^2 / (2 v))``. The paper leaves v open; here it is the mean of
    ``||f_i - f_j||^2`` over the minibatch, so that the scale of features does not matter.

    Features are (n, d), the result (n, n - 1): row i has the other samples in order, without i.
    """
    n = len(features)
    exact = "donot_use_mm_for_euclid_dist"  # equal features are at distance 0
    distances = torch.cdist(features, features, compute_mode=exact)
    # Without the diagonal: past the first entry, it is the last of every n + 1.
    distances = distances.flatten()[1:].reshape(n - 1, n + 1)[:, :-1].reshape(n, n - 1)
    squared = distances.square()
    variance = squared.mean().clamp(min=MIN_VARIANCE)
    return functional.log_softmax(-squared / (2 * variance), dim=1)
