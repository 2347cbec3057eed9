"""Auto: takes the strategy that does best with labels that differ as much as the nodes' do."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.auto.strategy import Auto

__all__ = ["Auto"]
__getattr__ = lazily(__name__, Auto="strategy")
