"""FedProto: messages between server and nodes, settings and declaration."""

from typing import Annotated

from flwr.app import ArrayRecord
from pydantic import Field

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import (
    EVALUATE_REQUEST,
    TRAIN_REQUEST,
    EvaluateMetrics,
    Reply,
    Share,
    TrainMetrics,
)
from flwr_distill.task.settings import Block, TrainSettings
from flwr_distill_baselines.common.class_means import class_means

TRAIN_PROTOTYPES = "train.prototypes"
"""Have a node train its own model, and send its prototypes."""

EVALUATE_PROTOTYPES = "evaluate.nearest_prototype"
"""Have a node evaluate its own model by the nearest global prototype."""

PROTOTYPES = "prototypes"
"""Name of the record of prototypes, the nodes' or the server's, and of its array of them."""

PROTOTYPE_DISTANCE = "prototype-distance"
"""Name of the record that asks for FedProto's loss term."""


class FedProtoSettings(Block):
    """Settings of FedProto (``fedproto.*``), also its request to nodes."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """lambda, weight of the distance to the global prototypes (the paper: 1 on MNIST and FEMNIST,
    0.1 on CIFAR-10)."""


class PrototypeEvaluation(EvaluateMetrics):
    """Metrics of a node's own model.

    Accuracy is by the nearest global prototype, and by the classifier, as is the loss.
    """

    classifier_accuracy: Share


def _check_prototypes(record: ArrayRecord, model: Arrays) -> None:
    class_means(record, {PROTOTYPES: None})


def _unprotected(settings: FedProtoSettings, train: TrainSettings) -> str:
    return (
        "nodes send mean features of their samples, without differential privacy (take another "
        "strategy)"
    )


def _disclosed(settings: FedProtoSettings) -> str:
    return (
        "Nodes sent the mean features of each of their classes, and how many samples they have of "
        "each. The mean of a single sample is that sample's features. Models stayed on nodes."
    )


METHOD = Method(
    name="fedproto",
    strategy="flwr_distill_baselines.fedproto.strategy:FedProto",
    summary="Nodes keep their models, and share class prototypes alone.",
    settings=FedProtoSettings,
    phases=(
        Phase(
            TRAIN_PROTOTYPES,
            "nodes train their own models",
            (Reply(metrics=TrainMetrics, arrays={PROTOTYPES: _check_prototypes}),),
            "flwr_distill_baselines.fedproto.client:train_prototypes",
            request=TRAIN_REQUEST.plus({PROTOTYPE_DISTANCE: FedProtoSettings}, (PROTOTYPES,)),
            leaves="mean features of each class, with counts",
            quorum=True,
            averaged="own",
        ),
        Phase(
            EVALUATE_PROTOTYPES,
            "nodes evaluate their own models",
            (Reply(metrics=PrototypeEvaluation),),
            "flwr_distill_baselines.fedproto.client:evaluate_prototypes",
            request=EVALUATE_REQUEST.plus({PROTOTYPE_DISTANCE: FedProtoSettings}, (PROTOTYPES,)),
            leaves="accuracies and loss of its own model on held-out samples",
            averaged="own",
        ),
    ),
    terms={PROTOTYPE_DISTANCE: "flwr_distill_baselines.fedproto.client:PrototypeDistance"},
    needs="flwr_distill_baselines.fedproto.client:needs",
    unprotected=_unprotected,
    outcome="personal",
    panels=("flwr_distill.strategies.common.panels:own_models",),
    disclosed=_disclosed,
)
