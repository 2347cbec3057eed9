"""FedAvg for nodes that may be hostile: declaration."""

from flwr_distill.protocol.method import Method, all_protected

METHODS = (
    Method(
        name="agreement",
        strategy="flwr_distill.strategies.agreement.strategy:Agreement",
        summary="FedAvg without models that are out of line, none longer than the median.",
        unprotected=all_protected,
        defaults={"defence": {"strategy": "agreement"}},
    ),
)
