"""Loss terms, which methods add to the cross-entropy of local training."""

from client.terms.choice import loss_terms
from client.terms.features import Features, extractor
from client.terms.proximal import Proximal
from client.terms.term import LossTerm

__all__ = ["Features", "LossTerm", "Proximal", "extractor", "loss_terms"]
