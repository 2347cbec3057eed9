"""CADIS: clusters of clients by what training changes, with an equal say each."""

from flwr_distill.strategies.cadis.strategy import CADIS

__all__ = ["CADIS"]
