"""Overrides of a SuperNode of Flower 1.39 to 1.42: those from 1.35 on."""

from flwr_distill.flower.line_1_35.node.overrides import override

__all__ = ["override"]
