"""FedMD: nodes keep models of their own and learn the mean of their logits on public samples."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedmd.strategy import FedMD

__all__ = ["FedMD"]
__getattr__ = lazily(__name__, FedMD="strategy")
