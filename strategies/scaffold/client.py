"""SCAFFOLD on nodes: control variates."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flwr_distill.client.session import Session
from flwr_distill.client.terms import LossTerm, store_tensors, stored_tensors, zeros
from flwr_distill.strategies.scaffold.method import CONTROL_VARIATE
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TrainSettings


class ControlVariate(LossTerm):
    """``<c - c_i, w>``, whose gradient corrects each step (Karimireddy et al. 2020, option II).

    The node stores c_i, at first 0: ``c_i+ = c_i - c + (w_t - w_i) / (K eta)`` after K steps
    with learning rate eta.

    Parameters
    ----------
    model : nn.Module
        In training; its parameters now are w_t.
    server : Mapping[str, Tensor]
        c, by name of the parameter; what is missing is 0, and what is not trained is ignored. A
        ValueError if c is of another model.
    settings : TrainSettings
        Of the round; a SettingsError unless steps are those of plain SGD.
    """

    mixes = "weights"

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        server: Mapping[str, Tensor],
        settings: TrainSettings,
    ) -> None:
        if settings.optimizer != "sgd" or settings.momentum:
            raise SettingsError(
                "SCAFFOLD reads its control variates off the steps of plain SGD",
                where=f"train.optimizer = {settings.optimizer!r}, train.momentum",
                value=settings.momentum,
                remedy="set sgd and 0",
            )
        self._session = session
        self._lr = settings.lr
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._own = stored_tensors(session, CONTROL_VARIATE, self._start) or zeros(self._start)
        self._server = zeros(self._start)
        state = model.state_dict()
        for name, value in server.items():
            if name not in state or value.shape != state[name].shape:
                raise ValueError(f"{CONTROL_VARIATE} {name} is not part of this run's model")
            if name in self._start:  # one node can add what is not trained to everyone's c
                self._server[name] = value.to(self._start[name].device)

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with the server's control variate."""
        server = content.array_records[CONTROL_VARIATE].to_torch_state_dict()
        return cls(session, model, server, settings)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on the minibatch."""
        inner = [
            ((self._server[name] - self._own[name]) * p).sum()
            for name, p in self._parameters.items()
        ]
        return torch.stack(inner).sum()

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """Store c_i+, and send its difference from c_i."""
        change = {
            name: (self._start[name] - p.detach()) / (steps * self._lr) - self._server[name]
            for name, p in self._parameters.items()
        }
        moved = {name: self._own[name] + value for name, value in change.items()}
        store_tensors(self._session, CONTROL_VARIATE, moved)
        return {CONTROL_VARIATE: ArrayRecord({n: value.cpu() for n, value in change.items()})}
