"""DynaFed: FedAvg, tuned at the server on virtual data made from its own trajectory."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.dynafed.strategy import DynaFed

__all__ = ["DynaFed"]
__getattr__ = lazily(__name__, DynaFed="strategy")
