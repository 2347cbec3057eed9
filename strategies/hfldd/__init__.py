"""HFLDD: clusters that see every class; members send virtual data, heads train."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.hfldd.strategy import HFLDD

__all__ = ["HFLDD"]
__getattr__ = lazily(__name__, HFLDD="strategy")
