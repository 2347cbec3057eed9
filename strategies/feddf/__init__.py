"""FedDF: FedAvg, and then the nodes' ensemble distilled on the server."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.feddf.strategy import FedDF

__all__ = ["FedDF"]
__getattr__ = lazily(__name__, FedDF="strategy")
