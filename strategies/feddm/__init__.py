"""FedDM: the server trains on virtual data that nodes distil around the global model."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.feddm.strategy import FedDM

__all__ = ["FedDM"]
__getattr__ = lazily(__name__, FedDM="strategy")
