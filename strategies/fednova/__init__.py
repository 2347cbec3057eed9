"""FedNova: averages of normalised local updates."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.fednova.strategy import FedNova

__all__ = ["FedNova"]
__getattr__ = lazily(__name__, FedNova="strategy")
