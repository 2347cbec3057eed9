"""FedProx's declaration."""

from protocol.method import Method, all_protected

METHODS = (
    Method(
        name="fedprox",
        strategy="strategies.fedprox:FedProx",
        summary="FedAvg whose nodes stay near the global model (train.proximal-mu).",
        terms={"proximal-mu": "client.terms.proximal:Proximal"},
        unprotected=all_protected,
        summed=("train",),
    ),
)
