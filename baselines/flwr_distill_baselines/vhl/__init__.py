"""VHL: shared virtual images of noise, which all nodes learn beside their own samples."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill_baselines.vhl.strategy import VHL

__all__ = ["VHL"]
__getattr__ = lazily(__name__, VHL="strategy")
