"""FedSeq: clusters in which the model goes around a ring of nodes; heads talk to the server."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedseq.strategy import FedSeq

__all__ = ["FedSeq"]
__getattr__ = lazily(__name__, FedSeq="strategy")
