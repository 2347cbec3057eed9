"""FedProto: nodes keep models of their own and share class prototypes."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.fedproto.strategy import FedProto

__all__ = ["FedProto"]
__getattr__ = lazily(__name__, FedProto="strategy")
