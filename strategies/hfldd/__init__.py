"""HFLDD: clusters that see every class; members send virtual data, heads train."""

from strategies.hfldd.strategy import HFLDD

__all__ = ["HFLDD"]
