"""Distillation of an ensemble on the server, on samples without labels (FedHEAD+, FedDF)."""

import copy
from collections.abc import Callable, Iterable, Iterator
from logging import INFO

import numpy as np
import torch
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_distill.distill.ensemble import distil_ensemble, teacher_probabilities
from flwr_distill.protocol.arrays import Arrays, load_arrays
from flwr_distill.strategies.common.draws import round_generator
from flwr_distill.strategies.common.ensemble import EnsembleDistillation


class ServerDistillation:
    """Distils weighted models into one that starts at their mean.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    reference : callable
        Loads the reference set, samples without labels (n, ...); called once, when first needed.
    request : EnsembleDistillation
        How to distil.
    seed : int (default: 0)
        Seed of the held-out part and of the minibatches, combined with the round.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Callable[[], Tensor],
        request: EnsembleDistillation,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._reference = reference
        self._request = request
        self._seed = seed
        self._device = device
        self._inputs: Tensor | None = None

    def __call__(
        self, members: Iterable[tuple[float, Arrays]], start: Arrays, server_round: int
    ) -> dict[str, NDArray[np.generic]]:
        """Distil ``sum_m p_m f(x; z_m)`` into a student that starts at `start`; return its arrays.

        Parameters
        ----------
        members : iterable of (float, Mapping[str, ndarray])
            Weight p_m and arrays z_m of each model.
        """
        if self._inputs is None:
            self._inputs = self._reference().to(self._device)
        request = self._request
        teacher = teacher_probabilities(
            self._models(members), self._inputs, average=request.average
        )
        student = self._with(start)
        draws = round_generator(self._seed, server_round)
        distilled = distil_ensemble(
            student, self._inputs, teacher, **request.arguments, generator=draws
        )
        log(INFO, "Distilled on %d reference samples: %s", len(self._inputs), distilled)
        return {name: value.cpu().numpy() for name, value in student.state_dict().items()}

    def _models(self, members: Iterable[tuple[float, Arrays]]) -> Iterator[tuple[float, nn.Module]]:
        for weight, arrays in members:
            yield weight, self._with(arrays)

    def _with(self, arrays: Arrays) -> nn.Module:
        model = copy.deepcopy(self._model).to(self._device)
        load_arrays(model, arrays)
        return model
