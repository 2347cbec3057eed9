"""Flower's FedProx, with the weight of its term from the run's settings."""

from typing import Any, Self

from flwr.serverapp.strategy import FedProx as FlowerFedProx

from flwr_distill.strategies.common.run import Run


class FedProx(FlowerFedProx):
    """FedProx (Li et al. 2020) as Flower has it; mu is the run's ``train.proximal-mu``."""

    @classmethod
    def from_run(cls, settings: None, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`."""
        return cls(**{**run.sampling, "proximal_mu": run.train.proximal_mu, **arguments})
