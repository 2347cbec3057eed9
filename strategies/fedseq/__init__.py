"""FedSeq: superclients whose nodes train one model after another."""

from strategies.fedseq.strategy import FedSeq

__all__ = ["FedSeq"]
