"""FedSeq: superclients whose nodes train one model after another."""

from flwr_distill.strategies.fedseq.strategy import FedSeq

__all__ = ["FedSeq"]
