"""Loss terms, which methods add to the cross-entropy of local training."""

from flwr_distill.client.terms.choice import loss_terms
from flwr_distill.client.terms.features import Features, extractor
from flwr_distill.client.terms.proximal import Proximal
from flwr_distill.client.terms.term import LossTerm

__all__ = ["Features", "LossTerm", "Proximal", "extractor", "loss_terms"]
