"""Closed-form heads: one linear head from the nodes' sums of frozen features."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.analytic.strategy import Analytic

__all__ = ["Analytic"]
__getattr__ = lazily(__name__, Analytic="strategy")
