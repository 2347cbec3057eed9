"""FedDF's declaration."""

from protocol.fedhead import FedHEADSettings
from protocol.method import Method

METHODS = (
    Method(
        name="feddf",
        strategy="strategies.feddf:FedDF",
        summary="FedAvg, and the nodes' ensemble distilled at the server.",
        settings=FedHEADSettings,
        table="fedhead",
    ),
)
