"""SCAFFOLD: control variates against the drift of nodes."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from flwr_distill.strategies.scaffold.strategy import SCAFFOLD

__all__ = ["SCAFFOLD"]
__getattr__ = lazily(__name__, SCAFFOLD="strategy")
