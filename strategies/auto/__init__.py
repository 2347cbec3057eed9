"""Auto: takes the strategy that does best with labels that differ as much as the nodes' do."""

from flwr_distill.strategies.auto.strategy import Auto

__all__ = ["Auto"]
