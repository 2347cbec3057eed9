"""FedHEAD: sectors whose leaders distil the ensemble of their members."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.fedhead.plus import FedHEADPlus
    from flwr_distill.strategies.fedhead.strategy import FedHEAD

__all__ = ["FedHEAD", "FedHEADPlus"]
__getattr__ = lazily(__name__, FedHEAD="strategy", FedHEADPlus="plus")
