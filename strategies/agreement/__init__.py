"""FedAvg for nodes that may be hostile."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.agreement.strategy import Agreement

__all__ = ["Agreement"]
__getattr__ = lazily(__name__, Agreement="strategy")
