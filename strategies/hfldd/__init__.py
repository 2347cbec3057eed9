"""HFLDD: clusters that see every class; members send virtual data, heads train."""

from flwr_distill.strategies.hfldd.strategy import HFLDD

__all__ = ["HFLDD"]
