"""Class anchors: nodes keep the features of a class near the federation's mean of it."""

from typing import TYPE_CHECKING

from flwr_distill.strategies.common.lazily import lazily

if TYPE_CHECKING:
    from class_anchors.strategy import ClassAnchors

__all__ = ["ClassAnchors"]
__getattr__ = lazily(__name__, ClassAnchors="strategy")
