"""FedDF: FedAvg, and then the nodes' ensemble distilled on the server."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.server_distillation import ServerDistillation
from flwr_distill.strategies.fedhead.method import FedHEADSettings


class FedDF(CheckedFedAvg):
    """Ensemble distillation on the server: FedHEAD+ without sectors (Lin et al. 2020).

    The server averages the nodes' models as FedAvg does, and distils their weighted ensemble into
    the mean on a reference set without labels.

    Parameters
    ----------
    model : nn.Module
        The run's architecture.
    reference_set : callable
        Gives the reference set, samples (n, ...); called once, when first needed.
    seed : int (default: 0)
        Seed of the held-out part and of the minibatches.
    device : torch.device or str (default: "cpu")
        Where the server distils.
    **kwargs
        Settings (`strategies.fedhead.method.FedHEADSettings`), and what Flower's FedAvg takes. The
        published FedDF takes ``average="logits"``.
    """

    settings: FedHEADSettings = FedHEADSettings()
    run_arguments = ("model", "seed", "device")

    def __init__(
        self,
        *,
        model: nn.Module,
        reference_set: Callable[[], Tensor],
        seed: int = 0,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        request = self.settings.server_distillation
        self._distil = ServerDistillation(model, reference_set, request, seed, device)

    @classmethod
    def from_run(cls, settings: FedHEADSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`."""
        reference = settings.reference, settings.reference_size, "fedhead.reference"
        own = {"reference_set": run.auxiliary(*reference)}
        return super().from_run(settings, run, **{**own, **arguments})

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the nodes' models and distil their ensemble into the mean."""
        members = [(update.num_examples, update.arrays) for update in updates]
        return self._distil(members, weighted_mean(members), self.server_round)
