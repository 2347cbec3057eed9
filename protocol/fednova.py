"""FedNova's declaration."""

from protocol.method import Method

METHODS = (
    Method(
        name="fednova",
        strategy="strategies.fednova:FedNova",
        summary="Local updates are divided by their number of steps before they are averaged.",
    ),
)
