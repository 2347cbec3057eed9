"""CADIS: clusters of clients by what training changes, with an equal say each."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.cadis.strategy import CADIS

__all__ = ["CADIS"]
__getattr__ = lazily(__name__, CADIS="strategy")
