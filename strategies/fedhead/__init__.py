"""FedHEAD: sectors whose leaders distil the ensemble of their members."""

from strategies.fedhead.strategy import FedHEAD

__all__ = ["FedHEAD"]
