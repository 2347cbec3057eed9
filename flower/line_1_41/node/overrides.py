"""Overrides of Flower 1.41's and 1.42's SuperNode: those of 1.36's."""

from flwr_distill.flower.line_1_36.node.overrides import override

__all__ = ["override"]
