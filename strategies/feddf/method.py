"""FedDF's declaration."""

from flwr_distill.protocol.method import Method
from flwr_distill.strategies.fedhead.method import FedHEADSettings

METHODS = (
    Method(
        name="feddf",
        strategy="flwr_distill.strategies.feddf.strategy:FedDF",
        summary="FedAvg, and the nodes' ensemble distilled at the server.",
        settings=FedHEADSettings,
        table="fedhead",
    ),
)
