"""FedAF: messages between server and nodes, settings and declaration."""

from typing import Annotated

import numpy as np
from flwr.app import ArrayRecord
from pydantic import Field

from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import (
    MAX_NUMBER,
    DistilledMetrics,
    Reply,
    Request,
    SentData,
    TrainRequest,
)
from flwr_distill.task.settings import Block, TrainSettings
from flwr_distill_baselines.common.class_means import check_distributions, class_means

CLASS_KNOWLEDGE = "query.class_knowledge"
"""Have a node store the global model, and send its predictions on the samples of each class."""

DISTILL_WITH_PEERS = "train.fedaf_distill"
"""Have a node distil its data with the peers' mean logits, and send them to the server."""

KNOWLEDGE = "knowledge"
"""Name of the array record of what the global model predicts, the nodes' or the server's."""

LOGITS = "logits"
"""Array of knowledge: mean logits of each class, (k, classes)."""

SOFT_LABELS = "soft-labels"
"""Array of a node's knowledge: mean softened predictions of each class, (k, classes)."""

MAX_LOGIT = 1e4
"""Of a node's mean logits: larger ones would drown the others' in the mean."""


class SoftLabelRequest(Block):
    """Request for what the global model predicts."""

    temperature: Annotated[float, Field(gt=0)] = 2.0
    """tau, of soft labels."""


class WithPeers(Block):
    """Distillation of a node's data with what peers know; also the request for it."""

    per_class: Annotated[int, Field(ge=1)] = 10
    """Virtual images of each class on a node (a public re-implementation: 50)."""
    distill_steps: Annotated[int, Field(ge=1)] = 200
    """Steps in which a node makes its virtual data in each round (that: 1,000, of SGD; here
    Adam's)."""
    local_weight: Annotated[float, Field(ge=0)] = 0.8
    """lambda_loc, weight of the distance to the peers' mean logits."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the global model in the models that features are matched in; the rest is random."""


class FedAFSettings(WithPeers):
    """Settings of FedAF (``fedaf.*``)."""

    temperature: Annotated[float, Field(gt=0)] = 2.0
    """tau, of the soft labels that the server matches."""
    global_weight: Annotated[float, Field(ge=0)] = 0.8
    """lambda_glob, weight of their divergence."""
    server_epochs: Annotated[int, Field(ge=1)] = 100
    """Epochs that the server trains on all virtual data of a round (a re-implementation has
    500)."""
    server_lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of its SGD."""
    server_batch_size: Annotated[int, Field(ge=1)] = 256
    """Minibatch of its SGD."""

    @property
    def soft_label_request(self) -> SoftLabelRequest:
        """The request for what the global model predicts."""
        return SoftLabelRequest(temperature=self.temperature)

    @property
    def with_peers(self) -> WithPeers:
        """The request for virtual data."""
        return WithPeers(**self.model_dump(include=set(WithPeers.model_fields)))


class KnowledgeMetrics(Block):
    """Samples that a node's knowledge is of."""

    num_examples: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


def class_knowledge(record: ArrayRecord, num_classes: int | None = None) -> Arrays:
    """Read a node's knowledge of its classes, checked; None as number of classes takes any.

    A ValueError says what else the record has, that logits are huge, or soft labels no
    distributions.
    """
    widths = {LOGITS: num_classes, SOFT_LABELS: num_classes}
    arrays = class_means(record, widths, num_classes)
    largest = float(np.abs(arrays[LOGITS]).max())
    if largest > MAX_LOGIT:
        raise ValueError(f"its {LOGITS} go up to {largest:.3g}")
    check_distributions(arrays[SOFT_LABELS], SOFT_LABELS)
    return arrays


def _check(record: ArrayRecord, model: Arrays) -> None:
    class_knowledge(record)


def _unprotected(settings: FedAFSettings, train: TrainSettings) -> str:
    return (
        "nodes send virtual data made from their own, and mean predictions on these, without "
        "differential privacy (take another strategy)"
    )


def _disclosed(settings: FedAFSettings) -> str:
    return (
        "In every round nodes sent the global model's mean predictions on each of their classes, "
        "how many samples they have of each, and virtual data of their samples, not sealed."
    )


METHOD = Method(
    name="fedaf",
    strategy="flwr_distill_baselines.fedaf.strategy:FedAF",
    summary="As FedDM, but nodes distil near what all predict, and the server matches that.",
    settings=FedAFSettings,
    phases=(
        Phase(
            CLASS_KNOWLEDGE,
            "nodes report the model's predictions",
            (Reply(metrics=KnowledgeMetrics, arrays={KNOWLEDGE: _check}),),
            "flwr_distill_baselines.fedaf.client:report_knowledge",
            request=Request({CONFIG: TrainRequest, CLASS_KNOWLEDGE: SoftLabelRequest}, (ARRAYS,)),
            leaves="what the model predicts on average on its samples of each class",
            averaged="own",
        ),
        Phase(
            DISTILL_WITH_PEERS,
            "nodes distil their data with their peers",
            (Reply(metrics=DistilledMetrics, configs={VIRTUAL_DATA: SentData}),),
            "flwr_distill_baselines.fedaf.client:distill",
            request=Request({CONFIG: TrainRequest, DISTILL_WITH_PEERS: WithPeers}, (KNOWLEDGE,)),
            leaves="virtual data, not sealed, and their privacy card",
            quorum=True,
            needed=True,
        ),
    ),
    unprotected=_unprotected,
    panels=("flwr_distill.strategies.common.panels:virtual_data",),
    disclosed=_disclosed,
)
