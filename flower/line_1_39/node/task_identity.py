"""Whose task a process works on: as from Flower 1.38 on."""

from flwr_distill.flower.line_1_38.node.task_identity import identify

__all__ = ["identify"]
