"""MOON on nodes: its model-contrastive loss."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm, store_tensors, stored_tensors
from flwr_distill.strategies.moon.method import MODEL_CONTRAST, MOONSettings
from flwr_distill.task.settings import TrainSettings

KEPT = "moon-previous"


class ModelContrastive(LossTerm):
    """``-mu log(e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau)))`` (Li et al. 2021, eq. 3).

    s_g is the cosine similarity of a sample's features in the model in training and in the global
    model; s_p that in the model in training and in the node's own at the end of its previous round
    (at first: the global one). Features are the input of the last dense layer; unlike in the paper,
    there is no projection head.

    Parameters
    ----------
    model : nn.Module
        In training; now it is the global model.
    request : MOONSettings
        mu and tau.
    layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    """

    mixes = "sample"

    def __init__(
        self, session: Session, model: nn.Module, request: MOONSettings, layer: str = ""
    ) -> None:
        self._session = session
        self._request = request
        self._global = copy.deepcopy(model).eval()
        self._previous = copy.deepcopy(model).eval()
        if state := stored_tensors(session, KEPT, model.state_dict()):
            self._previous.load_state_dict(state)
        self._features = [Features(m, layer) for m in (model, self._global, self._previous)]

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with MOON's record."""
        request = MOONSettings.checked(content.config_records[MODEL_CONTRAST], "message")
        return cls(session, model, request, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's mean over the minibatch."""
        with torch.no_grad():
            self._global(inputs)
            self._previous(inputs)
        own, *others = (features.last.flatten(1) for features in self._features)
        similarities = torch.stack([functional.cosine_similarity(own, z) for z in others], dim=1)
        nearer_to_global = torch.zeros(len(own), dtype=torch.int64, device=own.device)
        return self._request.mu * functional.cross_entropy(
            similarities / self._request.temperature, nearer_to_global
        )

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """Store the model as the node's previous one."""
        store_tensors(self._session, KEPT, model.state_dict())
        return {}
