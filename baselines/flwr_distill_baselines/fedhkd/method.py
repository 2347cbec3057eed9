"""FedHKD: messages between server and nodes, settings and declaration."""

from typing import Annotated

from flwr.app import ArrayRecord
from pydantic import Field

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import TRAIN, TRAIN_REQUEST
from flwr_distill.task.settings import Block, TrainSettings
from flwr_distill_baselines.common.class_means import check_distributions, class_means

TRAIN_KNOWLEDGE = "train.knowledge"
"""Have a node train with the global hyper-knowledge, and send its own with its model."""

HYPER_KNOWLEDGE = "hyper-knowledge"
"""Name of the array record of mean features and soft predictions, the nodes' or the server's."""

KNOWLEDGE_LOSS = "knowledge-loss"
"""Name of the record that asks for FedHKD's loss terms, see `FedHKDSettings`."""

FEATURES = "features"
"""Array of hyper-knowledge: mean features of each class, (k, d)."""

PREDICTIONS = "predictions"
"""Array of hyper-knowledge: mean soft predictions of each class, (k, classes)."""


class FedHKDSettings(Block):
    """Settings of FedHKD (``fedhkd.*``), also its request to nodes."""

    prediction_weight: Annotated[float, Field(ge=0)] = 0.05
    """lambda, weight of the divergence of predictions on the global mean features."""
    feature_weight: Annotated[float, Field(ge=0)] = 0.05
    """gamma, weight of the distance to the global mean features."""
    temperature: Annotated[float, Field(gt=0)] = 0.5
    """T of soft predictions."""
    noise: Annotated[float, Field(ge=0)] = 2.0
    """Standard deviation of the Gaussian noise on the mean features that a node sends. It is not
    calibrated: it guarantees no differential privacy."""


def hyper_knowledge(
    record: ArrayRecord, width: int | None = None, num_classes: int | None = None
) -> Arrays:
    """Read a node's hyper-knowledge, checked; None as width or number of classes takes any.

    A ValueError says what else the record has, or that predictions are no distributions.
    """
    arrays = class_means(record, {FEATURES: width, PREDICTIONS: num_classes}, num_classes)
    check_distributions(arrays[PREDICTIONS], PREDICTIONS)
    return arrays


def _check(record: ArrayRecord, model: Arrays) -> None:
    hyper_knowledge(record)


def _unprotected(settings: FedHKDSettings, train: TrainSettings) -> str:
    return (
        "nodes send mean features and predictions of their samples, whose noise is not calibrated "
        "to differential privacy (take another strategy)"
    )


def _disclosed(settings: FedHKDSettings) -> str:
    return (
        "Nodes sent the mean features and soft predictions of each of their classes, and how many "
        "samples they have of each. The features had Gaussian noise of standard deviation "
        f"{settings.noise:g}, which guarantees no differential privacy."
    )


METHOD = Method(
    name="fedhkd",
    strategy="flwr_distill_baselines.fedhkd.strategy:FedHKD",
    summary="Class means of features and soft predictions travel with the models.",
    settings=FedHKDSettings,
    phases=(
        Phase(
            TRAIN_KNOWLEDGE,
            "nodes train with hyper-knowledge",
            (TRAIN.plus(arrays={HYPER_KNOWLEDGE: _check}),),
            "flwr_distill_baselines.fedhkd.client:train_knowledge",
            request=TRAIN_REQUEST.plus({KNOWLEDGE_LOSS: FedHKDSettings}, (HYPER_KNOWLEDGE,)),
            leaves="the model, and mean features and predictions of each class with counts",
            quorum=True,
            averaged="own",
        ),
    ),
    terms={KNOWLEDGE_LOSS: "flwr_distill_baselines.fedhkd.client:Knowledge"},
    unprotected=_unprotected,
    disclosed=_disclosed,
)
