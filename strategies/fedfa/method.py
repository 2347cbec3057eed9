"""FedFA: settings and declaration."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import TRAIN_PHASE, Method
from flwr_distill.protocol.schema import TRAIN, Share, TrainMetrics
from flwr_distill.task.settings import Block, TrainSettings


class FedFASettings(Block):
    """Settings of FedFA (``fedfa.*``)."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of participation against accuracy."""
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of nodes and server."""
    server_lr: Annotated[float, Field(ge=0)] = 0.1
    """Step along the server's momentum; with 0 there is none."""


class AccuracyMetrics(TrainMetrics):
    """Metrics of local training, whose accuracy weighs the node."""

    train_accuracy: Share


def _unprotected(settings: FedFASettings, train: TrainSettings) -> str:
    return (
        "nodes send their accuracy on their data, without differential privacy (take another "
        "strategy)"
    )


METHODS = (
    Method(
        name="fedfa",
        strategy="flwr_distill.strategies.fedfa.strategy:FedFA",
        summary="Weights by training accuracy and participation; momentum on both sides.",
        settings=FedFASettings,
        phases=(
            replace(
                TRAIN_PHASE,
                replies=(TRAIN.plus(metrics=AccuracyMetrics),),
                leaves="the model, trained on its samples, and its training accuracy",
            ),
        ),
        unprotected=_unprotected,
    ),
)
