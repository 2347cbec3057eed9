"""FedDM: messages between server and nodes, settings and declaration."""

from typing import Annotated

from pydantic import Field

from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import DistilledMetrics, Reply, Request, SentData, TrainRequest
from flwr_distill.task.settings import Block, TrainSettings

DISTILL_AROUND = "train.feddm_distill"
"""Have a node distil its data around the global model, and send them to the server."""


class AroundModel(Block):
    """Distillation of a node's data around the global model; also the request for it."""

    per_class: Annotated[int, Field(ge=1)] = 10
    """Virtual images of each class on a node."""
    radius: Annotated[float, Field(gt=0)] = 5.0
    """rho: models to match means in lie no farther from the global one."""
    distill_steps: Annotated[int, Field(ge=1)] = 200
    """Steps in which a node makes its virtual data in each round (the paper: 1,000, of SGD; here
    Adam's)."""


class FedDMSettings(AroundModel):
    """Settings of FedDM (``feddm.*``)."""

    server_epochs: Annotated[int, Field(ge=1)] = 100
    """Epochs that the server trains on all virtual data of a round (the paper: 500)."""
    server_lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of its SGD."""
    server_batch_size: Annotated[int, Field(ge=1)] = 256
    """Minibatch of its SGD."""

    @property
    def around_model(self) -> AroundModel:
        """The request to nodes."""
        return AroundModel(**self.model_dump(include=set(AroundModel.model_fields)))


def _unprotected(settings: FedDMSettings, train: TrainSettings) -> str:
    return (
        "nodes send virtual data made from their own, without differential privacy (take another "
        "strategy)"
    )


def _disclosed(settings: FedDMSettings) -> str:
    return "Nodes sent virtual data of their samples to the server in every round, not sealed."


METHODS = (
    Method(
        name="feddm",
        strategy="flwr_distill.strategies.feddm.strategy:FedDM",
        summary="Nodes distil their data around the model; the server trains on all of them.",
        settings=FedDMSettings,
        phases=(
            Phase(
                DISTILL_AROUND,
                "nodes distil their data around the model",
                (Reply(metrics=DistilledMetrics, configs={VIRTUAL_DATA: SentData}),),
                "flwr_distill.strategies.feddm.client:distill",
                request=Request({CONFIG: TrainRequest, DISTILL_AROUND: AroundModel}, (ARRAYS,)),
                leaves="virtual data, not sealed, and their privacy card",
                quorum=True,
                needed=True,
            ),
        ),
        unprotected=_unprotected,
        panels=("flwr_distill.strategies.common.panels:virtual_data",),
        disclosed=_disclosed,
    ),
)
