"""FedDyn: nodes' objectives regularised dynamically, so that their optima agree."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.feddyn.strategy import FedDyn

__all__ = ["FedDyn"]
__getattr__ = lazily(__name__, FedDyn="strategy")
