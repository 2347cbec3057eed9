"""FedSeq of Zaccone et al.: superclients whose nodes train one model after another."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedseq_zaccone.strategy import FedSeq

__all__ = ["FedSeq"]
__getattr__ = lazily(__name__, FedSeq="strategy")
