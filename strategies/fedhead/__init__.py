"""FedHEAD: sectors whose leaders distil the ensemble of their members."""

from flwr_distill.strategies.fedhead.strategy import FedHEAD

__all__ = ["FedHEAD"]
