"""FedProx's declaration."""

from flwr_distill.protocol.method import Method, all_protected

METHODS = (
    Method(
        name="fedprox",
        strategy="flwr_distill.strategies.fedprox.strategy:FedProx",
        summary="FedAvg whose nodes stay near the global model (train.proximal-mu).",
        terms={"proximal-mu": "flwr_distill.client.terms:Proximal"},
        unprotected=all_protected,
        summed=("train",),
    ),
)
