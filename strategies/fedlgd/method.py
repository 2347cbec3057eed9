"""FedLGD: messages between server and nodes, settings and declaration."""

from collections.abc import Mapping
from typing import Annotated, Literal

from flwr.app import RecordDict
from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.method import ConfigValues, Method, Phase
from flwr_distill.protocol.schema import TRAIN, Reply, Request, TrainRequest, part_of_the_model
from flwr_distill.task.settings import Block, TrainSettings, VirtualSettings

TRAIN_VIRTUAL = "train.virtual"
"""Have a node train on virtual data in place of its own."""

VIRTUAL = "virtual"
"""Name of the record with the request for training on virtual data."""

GLOBAL_DATA = "global-data"
"""Name of the record of the server's virtual data."""

NEEDS_GLOBAL_DATA = "needs-global-data"
"""Metric of a node that does not have the global data of the digest it was sent."""

GRADIENT = "gradient"
"""Name of the reply's second array record: the loss's gradient on the virtual data."""


Regularisation = Literal["contrastive", "contrastive-sum", "mmd"]


class VirtualTraining(VirtualSettings):
    """A node's training on virtual data in one round."""

    per_class: Annotated[int, Field(ge=1)]
    formation: Annotated[int, Field(ge=1, le=4)] = 1
    first_steps: Annotated[int, Field(ge=1)]
    refine_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of distribution matching with the received model, before training."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """lambda, weight of the term between features of the node's and the server's data."""
    regulariser: Regularisation = "contrastive"
    """The term."""
    gradient: Annotated[list[str], Field(default_factory=list)]
    """Weights of the received model; the node sends the gradient with respect to these, of the
    model's loss on the virtual data."""
    dp_epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Epsilon that making the virtual data costs each sample; 0 is without differential privacy."""


class GlobalData(Block):
    """The server's virtual data: their digest, and the data for nodes without them."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the payload."""
    payload: bytes = b""
    """Encoded by :meth:`distill.virtual_data.VirtualData.to_bytes`; empty if the node has them."""


class FedLGDSettings(VirtualSettings):
    """Settings of FedLGD (``fedlgd.*``); those of nodes' virtual images also as ``virtual.*``."""

    refine_steps: Annotated[int, Field(ge=0)] = 20
    """Steps in which a node refines its virtual images in a selected round (the paper: 100)."""
    every: Annotated[int, Field(ge=1)] = 5
    """Rounds from one selected round to the next; the first round is selected."""
    selections: Annotated[int, Field(ge=0)] = 10
    """Selected rounds in all; with 0 this is FedAvg on virtual data."""
    contrast: Annotated[float, Field(ge=0)] = 1.0
    """lambda, weight of the regulariser (the paper: 10 on DIGITS, 1 on CIFAR10C)."""
    regulariser: Regularisation = "contrastive"
    """What draws features of the two sets together: a ``contrastive`` loss, its mean over the
    minibatch; ``contrastive-sum``, its sum, as in the paper's eq. 4; or ``mmd``, the distance of
    mean features by class (the paper's figure 3a)."""
    global_per_class: Annotated[int, Field(ge=1)] = 10
    """Virtual images of each class at the server, which start as noise."""
    global_steps: Annotated[int, Field(ge=1)] = 40
    """Steps in which the server refines them (the paper: 500), by ``image-optimizer`` too."""
    match: Literal["gradient", "update"] = "gradient"
    """What the server matches: the ``gradient`` of the loss on the nodes' virtual data at the
    round's model (the paper's), or the ``update`` made by the round's training (the published
    code's), for which nodes send only their models."""
    dp_epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Epsilon that a run costs each sample of a node, at ``train.dp-delta``: virtual data are made
    once, from differentially private class means, and everything that nodes send follows from them.
    Needs ``refine-steps = 0``; 0 is without differential privacy."""

    @field_validator("dp_epsilon")
    @classmethod
    def _is_one_release(cls, epsilon: float, info: ValidationInfo) -> float:
        if epsilon and info.data.get("refine_steps"):
            raise ValueError("refining has no differential privacy (set refine-steps to 0)")
        return epsilon


class LacksGlobalData(Block):
    """Metrics of a node that lost the server's virtual data."""

    needs_global_data: Literal[1]


def _unprotected(settings: FedLGDSettings, train: TrainSettings) -> str:
    return (
        "nodes train on virtual data, not on their samples (set train.dp-noise to 0, and for "
        "differential privacy fedlgd.dp-epsilon to 1.0 and fedlgd.refine-steps to 0)"
    )


def _epsilon(settings: FedLGDSettings, records: ConfigValues | None = None) -> float:
    if records is None:
        return settings.dp_epsilon
    request = VirtualTraining.checked(records.get(VIRTUAL, {}), "message")
    return 0.0 if request.refine_steps else request.dp_epsilon


def _summed(content: RecordDict, model: Arrays) -> Mapping[str, Arrays]:
    """Array records of the answers: the model, and the gradient if the message asks for one."""
    request = VirtualTraining.checked(content.config_records[VIRTUAL], "message")
    if not request.gradient:
        return {ARRAYS: model}
    return {ARRAYS: model, GRADIENT: {name: model[name] for name in request.gradient}}


METHODS = (
    Method(
        name="fedlgd",
        strategy="flwr_distill.strategies.fedlgd.strategy:FedLGD",
        summary="Nodes train on virtual data of their own and of the server, both refined.",
        settings=FedLGDSettings,
        phases=(
            Phase(
                TRAIN_VIRTUAL,
                "nodes train on virtual data",
                (
                    Reply(
                        metrics=TRAIN.metrics,
                        arrays={**TRAIN.arrays, GRADIENT: part_of_the_model},
                        optional={GRADIENT},
                    ),
                    Reply(metrics=LacksGlobalData),
                ),
                "flwr_distill.strategies.fedlgd.client:train_virtual",
                request=Request(
                    {CONFIG: TrainRequest, VIRTUAL: VirtualTraining, GLOBAL_DATA: GlobalData},
                    (ARRAYS,),
                ),
                leaves="the model, trained on its virtual data, and the loss's gradient on these",
                quorum=True,
                averaged="own",
                summed=_summed,
                own=(f"{GLOBAL_DATA}.payload",),
                epsilon=_epsilon,
            ),
        ),
        terms={VIRTUAL: "flwr_distill.strategies.fedlgd.client:Regulariser"},
        unprotected=_unprotected,
        summed=(TRAIN_VIRTUAL,),
        panels=("flwr_distill.strategies.common.panels:virtual_data",),
        defaults={"defence": {"aggregator": "agreement"}},
    ),
)
