"""FedProx's proximal term."""

from typing import Self

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flwr_distill.client.session import Session
from flwr_distill.client.terms.term import LossTerm
from flwr_distill.task.settings import TrainSettings


class Proximal(LossTerm):
    """``mu/2 ||w - w_t||^2`` (Li et al. 2020, eq. 2).

    Parameters
    ----------
    model : nn.Module
        In training; its parameters now are w_t.
    mu : float
        Weight of the term.
    """

    mixes = "weights"

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._parameters]
        self._mu = mu

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term; see `client.terms.LossTerm`."""
        return cls(model, settings.proximal_mu)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on the minibatch."""
        pairs = zip(self._parameters, self._start, strict=True)
        return self._mu / 2 * torch.stack([(p - w).square().sum() for p, w in pairs]).sum()
