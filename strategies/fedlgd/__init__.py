"""FedLGD: training on virtual data of nodes and server, which are refined along the way."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.fedlgd.strategy import FedLGD

__all__ = ["FedLGD"]
__getattr__ = lazily(__name__, FedLGD="strategy")
