"""FedAF: nodes distil their data near what all of them predict, and the server learns both."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedaf.strategy import FedAF

__all__ = ["FedAF"]
__getattr__ = lazily(__name__, FedAF="strategy")
