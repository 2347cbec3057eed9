"""FedHKD: class means of features and soft predictions travel with the models."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedhkd.strategy import FedHKD

__all__ = ["FedHKD"]
__getattr__ = lazily(__name__, FedHKD="strategy")
