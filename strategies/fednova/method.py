"""FedNova's declaration."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.schema import MAX_NUMBER, TRAIN, TrainMetrics


class StepsMetrics(TrainMetrics):
    """Metrics of local training, by whose steps the update is divided."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


METHODS = (
    Method(
        name="fednova",
        strategy="flwr_distill.strategies.fednova.strategy:FedNova",
        summary="Local updates are divided by their number of steps before they are averaged.",
        phases=(replace(TRAIN_PHASE, replies=(TRAIN.plus(metrics=StepsMetrics),)),),
        unprotected=all_protected,
    ),
)
