"""FedHEAD+: FedHEAD, with one more distillation on the server."""

from collections.abc import Callable
from logging import WARNING
from typing import Any, Self

import torch
from flwr.common import log
from torch import Tensor, nn

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.server_distillation import ServerDistillation
from flwr_distill.strategies.fedhead.means import Weighted
from flwr_distill.strategies.fedhead.method import FedHEADSettings
from flwr_distill.strategies.fedhead.strategy import FedHEAD
from flwr_distill.task.auxiliary_names import NOISE


class FedHEADPlus(FedHEAD):
    """FedHEAD, and then the sectors' ensemble distilled on the server (FedHEAD+).

    After step 5 the server distils ``sum_m p_m f(x; z_m)`` into w on a reference set without
    labels, samples (n, ...), which `reference_set` gives when it is first needed. Further arguments
    are those of :class:`FedHEAD`.
    """

    run_arguments = (*FedHEAD.run_arguments, "model", "device")

    def __init__(
        self,
        *,
        model: nn.Module,
        reference_set: Callable[[], Tensor],
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        request = self.settings.server_distillation
        self._distil = ServerDistillation(model, reference_set, request, self.seed, device)

    @classmethod
    def from_run(cls, settings: FedHEADSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`."""
        if settings.reference == NOISE:
            log(
                WARNING,
                "fedhead-plus distils on images of noise, which say little of the nodes' images: "
                "where their labels differ much, that costs accuracy (set fedhead.reference to "
                'images like theirs, or strategy to "fedhead")',
            )
        reference = settings.reference, settings.reference_size, "fedhead.reference"
        own = {"reference_set": run.auxiliary(*reference)}
        return super().from_run(settings, run, **{**own, **arguments})

    def combine(self, server_round: int, sectors: list[Weighted]) -> Arrays:
        """Distil the sectors' ensemble into the mean of step 5."""
        return self._distil(sectors, weighted_mean(sectors), server_round)
