"""FedDF's declaration."""

from flwr_distill.protocol.fedhead import FedHEADSettings
from flwr_distill.protocol.method import Method

METHODS = (
    Method(
        name="feddf",
        strategy="flwr_distill.strategies.feddf:FedDF",
        summary="FedAvg, and the nodes' ensemble distilled at the server.",
        settings=FedHEADSettings,
        table="fedhead",
    ),
)
