"""FedSeq: messages between server, nodes and the next node, settings and declaration."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flwr_distill.links.records import Delivery, Parcel, Route
from flwr_distill.protocol.messages import ARRAYS, CONFIG, DELIVERY, PARCEL, ROUTE
from flwr_distill.protocol.method import Method, Phase, all_protected
from flwr_distill.protocol.schema import (
    TRAIN_REQUEST,
    Count,
    LinkReport,
    Reply,
    Request,
    Share,
    TrainMetrics,
    like_the_model,
)
from flwr_distill.task.auxiliary_names import check_auxiliary
from flwr_distill.task.settings import Block

REPORT_CONFIDENCE = "query.fedseq_confidence"
"""Ask a node what its pre-trained model predicts on the auxiliary set, on average."""

TRAIN_IN_TURN = "train.fedseq_turn"
"""Have a node train the model and pass it to the next node of its superclient."""

TRAIN_LAST = "train.fedseq_last"
"""Have the last node of a superclient train the model and send it to the server."""

PASS_AGAIN = "train.fedseq_again"
"""Have a node pass what it trained to another node, or to the server if no route is given."""

PASSED_MODEL = "passed-model"
"""Purpose of a parcel: the model that a superclient trains, for its next node."""

CONFIDENCE = "confidence"
"""Metric: mean predicted probability of each class."""


class Pretraining(Block):
    """How nodes estimate their classes; also the request for it."""

    pretraining_epochs: Annotated[int, Field(ge=1)] = 10
    """Epochs that a node trains the initial model before it reports the mean prediction."""
    auxiliary: Annotated[str, AfterValidator(check_auxiliary)] = "noise"
    """Samples for these predictions, which every node builds for itself: ``noise``,
    ``fashion-mnist``, ``tiny-imagenet``, or a folder or npz that is on every node, or ``@NAME`` for
    what nodes' owners call so."""
    auxiliary_size: Annotated[int, Field(ge=1)] = 1000
    """Number of these samples."""


class FedSeqSettings(Pretraining):
    """Settings of FedSeq (``fedseq.*``)."""

    most_nodes: Annotated[int, Field(ge=1)] = 11
    """Nodes of a superclient, at most."""
    least_samples: Annotated[int, Field(ge=1)] = 800
    """Samples with which a superclient is complete, however few its nodes."""

    @property
    def pretraining(self) -> Pretraining:
        """The request to nodes."""
        return Pretraining(**self.model_dump(include=set(Pretraining.model_fields)))


class ConfidenceMetrics(Block):
    """What a node's pre-trained model predicts on average: a probability for each class."""

    num_examples: Count
    confidence: list[Share]


class Rejected(Block):
    """Metrics of a node that could not use the model of the node before it."""

    rejected: Literal[1]


_IN_TURN = TRAIN_REQUEST.plus({ROUTE: Route, DELIVERY: Delivery})


def _disclosed(settings: FedSeqSettings) -> str:
    return (
        "Nodes reported what a model trained on their data alone predicts on average, and "
        "got the model that the node before them had just trained."
    )


METHOD = Method(
    name="fedseq",
    strategy="flwr_distill_baselines.fedseq.strategy:FedSeq",
    summary="Superclients of unlike nodes, which train one model after another, are averaged.",
    settings=FedSeqSettings,
    phases=(
        Phase(
            REPORT_CONFIDENCE,
            "nodes report their predictions",
            (Reply(metrics=ConfidenceMetrics),),
            "flwr_distill_baselines.fedseq.client:report_confidence",
            request=Request({CONFIG: Pretraining}),
            leaves="what a model trained on its samples predicts on average",
            covered=(CONFIDENCE,),
        ),
        Phase(
            TRAIN_IN_TURN,
            "nodes train and pass the model on",
            (
                Reply(
                    metrics=TrainMetrics,
                    configs={PARCEL: Parcel, CONFIG: LinkReport},
                    optional={PARCEL, CONFIG},
                ),
                Reply(metrics=Rejected),
            ),
            "flwr_distill_baselines.fedseq.client:train_in_turn",
            request=_IN_TURN,
            leaves="the model, trained on its samples after others', sealed for the next node",
        ),
        Phase(
            PASS_AGAIN,
            "nodes pass the model again",
            (
                Reply(configs={PARCEL: Parcel, CONFIG: LinkReport}, optional={PARCEL, CONFIG}),
                Reply(arrays={ARRAYS: like_the_model}),
            ),
            "flwr_distill_baselines.fedseq.client:pass_again",
            request=Request({ROUTE: Route}),
            leaves="the model, trained on its samples after others'",
        ),
        Phase(
            TRAIN_LAST,
            "the last nodes of superclients train",
            (
                Reply(metrics=TrainMetrics, arrays={ARRAYS: like_the_model}),
                Reply(metrics=Rejected),
            ),
            "flwr_distill_baselines.fedseq.client:train_in_turn",
            request=_IN_TURN,
            leaves="the model, trained on its samples after others'",
            quorum=True,
            averaged="own",
        ),
    ),
    needs="flwr_distill_baselines.fedseq.client:needs",
    unprotected=all_protected,
    disclosed=_disclosed,
    formulas="flwr_distill_baselines.fedseq.strategy:formulas",
)
