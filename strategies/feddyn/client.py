"""FedDyn on nodes: its dynamic regulariser."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flwr_distill.client.session import Session
from flwr_distill.client.terms import LossTerm, Proximal, store_tensors, stored_tensors, zeros
from flwr_distill.strategies.feddyn.method import DYNAMIC, FedDynSettings
from flwr_distill.task.settings import TrainSettings

KEPT = "feddyn-gradient"


class Dynamic(LossTerm):
    """``-<g_i, w> + alpha/2 ||w - w_t||^2`` (Acar et al. 2021, Algorithm 1).

    The node stores g_i, at first 0: ``g_i <- g_i - alpha (w_i - w_t)`` after the round.

    Parameters
    ----------
    model : nn.Module
        In training; its parameters now are w_t.
    """

    mixes = "weights"

    def __init__(self, session: Session, model: nn.Module, alpha: float) -> None:
        self._session = session
        self._alpha = alpha
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._gradient = stored_tensors(session, KEPT, self._start) or zeros(self._start)
        self._proximal = Proximal(model, alpha)

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with FedDyn's record."""
        request = FedDynSettings.checked(content.config_records[DYNAMIC], "message")
        return cls(session, model, request.alpha)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on the minibatch."""
        inner = [(self._gradient[name] * p).sum() for name, p in self._parameters.items()]
        return self._proximal(inputs, labels, logits) - torch.stack(inner).sum()

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """Store the new g_i; the server computes its own state from the model."""
        moved = {
            name: self._gradient[name] - self._alpha * (p.detach() - self._start[name])
            for name, p in self._parameters.items()
        }
        store_tensors(self._session, KEPT, moved)
        return {}
