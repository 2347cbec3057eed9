"""MOON: model-contrastive federated learning."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.moon.strategy import MOON

__all__ = ["MOON"]
__getattr__ = lazily(__name__, MOON="strategy")
