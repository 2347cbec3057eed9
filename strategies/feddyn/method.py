"""FedDyn: settings, which are also its request to nodes, and declaration."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.schema import TRAIN_REQUEST
from flwr_distill.task.settings import Block

DYNAMIC = "dynamic-regularisation"
"""Name of the record that asks for FedDyn's regulariser."""


class FedDynSettings(Block):
    """Settings of FedDyn (``feddyn.*``)."""

    alpha: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the regulariser; the paper takes 0.1, 0.01 or 0.001."""


METHODS = (
    Method(
        name="feddyn",
        strategy="flwr_distill.strategies.feddyn.strategy:FedDyn",
        summary="Nodes' objectives are regularised so that their optima agree.",
        settings=FedDynSettings,
        phases=(replace(TRAIN_PHASE, request=TRAIN_REQUEST.plus({DYNAMIC: FedDynSettings})),),
        terms={DYNAMIC: "flwr_distill.strategies.feddyn.client:Dynamic"},
        unprotected=all_protected,
    ),
)
