"""FedSeq of Zaccone et al.: the report of predictions, settings and declaration."""

from typing import Annotated

from pydantic import AfterValidator, Field

from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.method import Method, Phase, all_protected
from flwr_distill.protocol.schema import Count, PrivacyMetrics, Reply, Request, Share
from flwr_distill.task.auxiliary_names import check_auxiliary
from flwr_distill.task.settings import Block
from flwr_distill_baselines.common.passing.messages import Turns

REPORT_CONFIDENCE = "query.fedseq_zaccone_confidence"
"""Ask a node what its pre-trained model predicts on the auxiliary set, on average."""

TURNS = Turns.of("fedseq_zaccone")
"""Messages with which the model passes through a superclient."""

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
    """Settings of the FedSeq of Zaccone et al. (``fedseq-zaccone.*``)."""

    most_nodes: Annotated[int, Field(ge=1)] = 11
    """Nodes of a superclient, at most."""
    least_samples: Annotated[int, Field(ge=1)] = 800
    """Samples with which a superclient is complete, however few its nodes."""

    @property
    def pretraining(self) -> Pretraining:
        """The request to nodes."""
        return Pretraining(**self.model_dump(include=set(Pretraining.model_fields)))


class ConfidenceMetrics(PrivacyMetrics):
    """What a node's pre-trained model predicts on average: a probability for each class."""

    num_examples: Count
    confidence: list[Share]


def _disclosed(settings: FedSeqSettings) -> str:
    return (
        "Nodes reported what a model trained on their data alone predicts on average, and "
        "got the model that the node before them had just trained."
    )


METHOD = Method(
    name="fedseq-zaccone",
    strategy="flwr_distill_baselines.fedseq_zaccone.strategy:FedSeq",
    summary="Superclients of unlike nodes, which train one model after another, are averaged.",
    settings=FedSeqSettings,
    phases=(
        Phase(
            REPORT_CONFIDENCE,
            "nodes report their predictions",
            (Reply(metrics=ConfidenceMetrics),),
            "flwr_distill_baselines.fedseq_zaccone.client:report_confidence",
            request=Request({CONFIG: Pretraining}),
            leaves="what a model trained on its samples predicts on average",
            covered=(CONFIDENCE,),
        ),
        *TURNS.phases("superclient"),
    ),
    needs="flwr_distill_baselines.fedseq_zaccone.client:needs",
    unprotected=all_protected,
    disclosed=_disclosed,
    formulas="flwr_distill_baselines.common.passing.strategy:formulas",
)
