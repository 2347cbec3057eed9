"""Messages with which a model passes from node to node."""

from dataclasses import dataclass
from typing import Literal

from flwr_distill.links.records import Delivery, Parcel, Route
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    PARCEL,
    PARCEL_CODEC,
    ROUTE,
)
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.parcels import ParcelCoding
from flwr_distill.protocol.schema import (
    TRAIN_REQUEST,
    LinkReport,
    Reply,
    Request,
    TrainMetrics,
    like_the_model,
)
from flwr_distill.task.settings import Block

PASSED_MODEL = "passed-model"
"""Purpose of a parcel: the model that a group trains, for its next node."""

SENT = Reply(configs={PARCEL: Parcel, CONFIG: LinkReport}, optional={PARCEL, CONFIG})
"""A parcel for the next node, or why there is none."""


class Rejected(Block):
    """Metrics of a node that could not use the model of the node before it."""

    rejected: Literal[1]


@dataclass(frozen=True)
class Turns:
    """Message types of a method whose model passes from node to node.

    Parameters
    ----------
    in_turn : str
        Have a node train the model and pass it to the next node of its group.
    last : str
        Have the last node of a group train the model and send it to the server.
    again : str
        Have a node pass what it trained to another node, or to the server if no route is given.
    """

    in_turn: str
    last: str
    again: str

    @classmethod
    def of(cls, method: str) -> "Turns":
        """Types of a method, by its name with underscores."""
        return cls(f"train.{method}_turn", f"train.{method}_last", f"train.{method}_again")

    def phases(self, group: str) -> tuple[Phase, ...]:
        """Phases of these messages; `group` is what the method calls one, for the log."""
        client = "flwr_distill_baselines.common.passing.client"
        coded_route: dict[str, type[Block]] = {ROUTE: Route, PARCEL_CODEC: ParcelCoding}
        request = TRAIN_REQUEST.plus({**coded_route, DELIVERY: Delivery})
        in_turn = Reply(
            metrics=TrainMetrics,
            configs={PARCEL: Parcel, CONFIG: LinkReport},
            optional={PARCEL, CONFIG},
        )
        last = Reply(metrics=TrainMetrics, arrays={ARRAYS: like_the_model})
        return (
            Phase(
                self.in_turn,
                "nodes train and pass the model on",
                (in_turn, Reply(metrics=Rejected)),
                f"{client}:train_in_turn",
                request=request,
                leaves="the model, trained on its samples after others', sealed for the next node",
            ),
            Phase(
                self.again,
                "nodes pass the model again",
                (SENT, Reply(arrays={ARRAYS: like_the_model})),
                f"{client}:pass_again",
                request=Request(coded_route),
                leaves="the model, trained on its samples after others'",
            ),
            Phase(
                self.last,
                f"the last nodes of {group}s train",
                (last, Reply(metrics=Rejected)),
                f"{client}:train_last",
                request=request,
                leaves="the model, trained on its samples after others'",
                quorum=True,
                averaged="own",
            ),
        )
