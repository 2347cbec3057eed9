"""Flower's FedProx, with the weight of its term from the run's settings."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.fedprox.strategy import FedProx

__all__ = ["FedProx"]
__getattr__ = lazily(__name__, FedProx="strategy")
