"""FedSeq of Chen et al.: the head's message, settings and declaration."""

from typing import Annotated

from pydantic import Field

from flwr_distill.links.records import Route
from flwr_distill.protocol.messages import ARRAYS, PARCEL_CODEC, ROUTE
from flwr_distill.protocol.method import Method, Phase, all_protected
from flwr_distill.protocol.parcels import ParcelCoding
from flwr_distill.protocol.schema import Request
from flwr_distill.task.settings import Block
from flwr_distill_baselines.common.passing.messages import SENT, Turns

TURNS = Turns.of("fedseq")
"""Messages with which the model goes around a cluster's ring."""

PASS_ON = "query.fedseq_pass_on"
"""Have a cluster's head pass the global model to the first node of the ring, untrained."""


class FedSeqSettings(Block):
    """Settings of FedSeq (``fedseq.*``)."""

    cluster_size: Annotated[int, Field(ge=1)] = 10
    """J, nodes of a cluster; as many clusters as that takes, of sizes that differ by one at most
    (HFLDD's paper: 10 of 100 nodes)."""


def _disclosed(settings: FedSeqSettings) -> str:
    return "Nodes got the model that the node before them had just trained."


METHOD = Method(
    name="fedseq",
    strategy="flwr_distill_baselines.fedseq.strategy:FedSeq",
    summary="Random clusters, each with a ring in which nodes train in turn; heads are averaged.",
    settings=FedSeqSettings,
    phases=(
        Phase(
            PASS_ON,
            "heads pass the model on",
            (SENT,),
            "flwr_distill_baselines.fedseq.client:pass_on",
            request=Request({ROUTE: Route, PARCEL_CODEC: ParcelCoding}, (ARRAYS,)),
        ),
        *TURNS.phases("cluster"),
    ),
    unprotected=all_protected,
    disclosed=_disclosed,
    formulas="flwr_distill_baselines.common.passing.strategy:formulas",
)
