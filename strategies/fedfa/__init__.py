"""FedFA: weights from training accuracy and participation, and momentum on nodes and server."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.fedfa.strategy import FedFA

__all__ = ["FedFA"]
__getattr__ = lazily(__name__, FedFA="strategy")
