"""HFLDD: messages between server and nodes, settings and declaration."""

from typing import Annotated, Any, Literal

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.links.records import Delivery, Parcel, Route
from flwr_distill.protocol.arrays import Arrays, finite_arrays
from flwr_distill.protocol.messages import ARRAYS, CONFIG, PARCEL, ROUTE
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import (
    TRAIN,
    Count,
    DistilledMetrics,
    PrivacyMetrics,
    Reply,
    Request,
    Share,
    TrainMetrics,
)
from flwr_distill.strategies.hfldd.requests import (
    Distillation,
    LabelKnowledge,
    LabelRequest,
    ParcelBounds,
    PoolRequest,
    Refinement,
    VoteRequest,
)
from flwr_distill.task.settings import Block, TrainSettings

LABEL_KNOWLEDGE = "query.label_knowledge"
"""Ask a node for its soft labels on the global auxiliary set (step 1)."""
DISTILL = "train.distill"
"""Have a cluster member distil its data for its head (step 4)."""
RECEIVE = "train.receive"
"""Hand a cluster head the parcels of its members (step 4)."""
TRAIN_POOL = "train.pool"
"""Have a cluster head train on D_h: its own data and its members' virtual data."""
VOTE = "query.vote"
"""Ask a cluster head how well other heads' models know its members' virtual data."""

VOTER = "voter"
"""Record with another head's model, ``voter.<place>``, to vote on virtual data."""
REFINEMENT = "refinement"
"""Config record of a request to distil, see `Refinement`; the global model comes with it."""
SOFT_LABELS = "soft-labels"
"""Array of a node's soft labels."""

KNOWN = "known"
RANKS = "ranks"
"""Config keys of the request for votes, see `VoteRequest`."""
BALANCED = "balanced"
AVERAGE_LAST = "average-last"
VIRTUAL_SHARE = "virtual-share"
LEFT_OUT = "left-out"
"""Config keys of a head's train message, see `PoolRequest`."""

VOTES = "votes"
KEPT_PARCELS = "kept-parcels"
NUM_PARCELS = "num-parcels"
OWN_DIVERGENCE = "own-divergence"
"""Metrics, see `VoteMetrics`, `ReceiveMetrics`, `PoolMetrics` and `LabelKnowledgeMetrics`."""


class HFLDDSettings(LabelKnowledge, Distillation):
    """Settings of HFLDD (``hfldd.*``): those of both requests to nodes, and the server's own."""

    groups: Annotated[int, Field(ge=0)] = 0
    """K, the homogeneous groups; 0 takes the K with the best silhouette, at most the number of
    classes."""
    heads: Literal["auto", "one", "all"] = "auto"
    """Who of a cluster trains: ``one`` node a round, as in the paper, or ``all`` nodes, as many of
    them as ``fraction-train`` says. With ``all``, every node gets the others' virtual data and
    trains on a share of them, which falls evenly to 0 over the first half of the rounds. ``auto``
    is ``one``, but where ``strategy = "auto"`` trains on images from 16 pixels a side on."""
    balanced: bool = True
    """Whether the one head draws classes evenly from D_h."""
    votes: bool = False
    """Whether models of other heads vote on virtual data; heads leave out what is voted out. Only
    with ``heads = "one"``, and without ``rotate`` and ``complete-clusters``."""
    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Rounds after which members refine their virtual data with the global model and send them
    again; 0 never."""
    refresh_steps: Annotated[int, Field(ge=1)] = 20
    """Steps of each refinement, of distribution matching with the global model's features."""
    rotate: Annotated[bool, Field(validate_default=True)] = True
    """Whether another node of each cluster is its head in every round, so that each node's own data
    are trained on; if not, heads stay, as in the paper."""
    average_last: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of its steps, the last ones, over which a head that trains alone averages its weights;
    0 sends the last weights, as in the paper. Not with ``train.dp-noise``."""
    average_rounds: bool = True
    """Whether the global model is the mean of all rounds' models, the t-th of weight t, where one
    head trains a round; heads still start from the last round's. If not, it is the last round's, as
    in the paper."""
    complete_clusters: Annotated[bool, Field(validate_default=True)] = True
    """Whether there are only as many clusters as nearly all groups have nodes for; if not, as many
    as the largest group has nodes, as in the paper, the last of which miss classes."""

    @field_validator("refresh_every")
    @classmethod
    def _can_refine(cls, every: int, info: ValidationInfo) -> int:
        if every and info.data.get("heads") == "all":
            raise ValueError('only one head is refined for: heads = "all" (set it to 0)')
        if every and info.data.get("share_raw_data"):
            raise ValueError("there is nothing to refine in raw data (set it to 0)")
        if every and info.data.get("dp_epsilon"):
            raise ValueError("refining has no differential privacy (set it to 0)")
        return every

    @field_validator("votes")
    @classmethod
    def _has_other_heads(cls, on: bool, info: ValidationInfo) -> bool:
        if on and info.data.get("heads") == "all":
            raise ValueError('heads = "all" leaves no model that can judge (set it to false)')
        return on

    @field_validator("rotate", "complete_clusters")
    @classmethod
    def _goes_with_votes(cls, on: bool, info: ValidationInfo) -> bool:
        if on and info.data.get("votes"):
            rotate = "which judge a head's virtual data after its first round"
            why = rotate if info.field_name == "rotate" else "which three or more clusters decide"
            raise ValueError(f"must be false for hfldd.votes, {why} (set it to false)")
        return on

    @property
    def label_knowledge(self) -> LabelKnowledge:
        """The request for soft labels."""
        return LabelKnowledge(**self.model_dump(include=set(LabelKnowledge.model_fields)))

    @property
    def distillation(self) -> Distillation:
        """The request for virtual data."""
        return Distillation(**self.model_dump(include=set(Distillation.model_fields)))


class LabelKnowledgeMetrics(PrivacyMetrics):
    """Metrics sent with soft labels; the divergence, in nats, if the request says so."""

    num_examples: Count
    own_divergence: Annotated[float, Field(ge=0)] | None = None


class DistillMetrics(PrivacyMetrics, DistilledMetrics):
    """Metrics sent with a parcel of virtual data: its size, privacy card and audit."""

    num_values: Count
    virtual_epsilon: Annotated[float, Field(ge=0)] | None = None
    audited_ordinary: Share | None = None
    audited_worst: Share | None = None


class ReceiveMetrics(Block):
    """A head's reply to its members' parcels: |D_h|, ranks that it keeps, and rejected parcels."""

    num_examples: Count
    kept_parcels: list[Count]
    rejected: Count


class VoteMetrics(Block):
    """Votes on parcels: of the first rank by each voter, of the second by each, and so on.

    A vote is the share of the other classes that the voter finds less likely than the parcel's
    label, as the mean over those of the parcel's classes that it may judge: 1 if it always agrees
    or may judge none, 0.5 by chance.
    """

    votes: list[Share]


class PoolMetrics(TrainMetrics):
    """Metrics of a head's training, with the number of members whose data it used."""

    num_parcels: Count


def soft_labels_of(record: ArrayRecord) -> NDArray[Any]:
    """Soft labels in a record, (|D_g|, classes); ValueError unless rows sum to 1 within 1e-3."""
    if list(record) != [SOFT_LABELS]:
        raise ValueError(f"its arrays are not {SOFT_LABELS}")
    labels: NDArray[Any] = finite_arrays(record)[SOFT_LABELS]
    if (
        labels.ndim != 2
        or labels.dtype.kind != "f"
        or (labels < 0).any()
        or not np.allclose(labels.sum(axis=1), 1.0, atol=1e-3)
    ):
        raise ValueError(f"its {SOFT_LABELS} are not distributions over D_g")
    return labels


def _check_soft_labels(record: ArrayRecord, model: Arrays) -> None:
    soft_labels_of(record)


def _unprotected(settings: HFLDDSettings, train: TrainSettings) -> str:
    if not settings.dp_epsilon:
        return (
            "hfldd.dp-epsilon = 0: members' virtual data would have no differential privacy (set "
            'hfldd.dp-epsilon to 10.0, and hfldd.start to "noise")'
        )
    if settings.balanced and settings.heads != "all":
        return (
            "hfldd.balanced = true: samples of rare classes would come more often than "
            "differential privacy counts (set hfldd.balanced to false)"
        )
    return ""


def _disclosed(settings: HFLDDSettings) -> str:
    if settings.share_raw_data:
        return "hfldd.share-raw-data was on: members sent their RAW DATA to cluster heads."
    return ""


METHODS = (
    Method(
        name="hfldd",
        strategy="flwr_distill.strategies.hfldd.strategy:HFLDD",
        summary="Members distil their data for cluster heads; only heads train with the server.",
        settings=HFLDDSettings,
        phases=(
            Phase(
                LABEL_KNOWLEDGE,
                "soft labels on the auxiliary set",
                (Reply(metrics=LabelKnowledgeMetrics, arrays={ARRAYS: _check_soft_labels}),),
                "flwr_distill.strategies.hfldd.client:label_knowledge",
                request=Request({CONFIG: LabelRequest}),
                leaves="soft labels on an auxiliary set, and how unlike those of its halves are",
                single=False,
            ),
            Phase(
                DISTILL,
                "members distil their data",
                (Reply(metrics=DistillMetrics, configs={PARCEL: Parcel}),),
                "flwr_distill.strategies.hfldd.client:distill",
                request=Request(
                    {CONFIG: Distillation, ROUTE: Route, REFINEMENT: Refinement}, (ARRAYS,)
                ),
                leaves="virtual data, sealed for the cluster's head, and their privacy card",
            ),
            Phase(
                RECEIVE,
                "heads get their members' virtual data",
                (Reply(metrics=ReceiveMetrics),),
                "flwr_distill.strategies.hfldd.client:receive",
                request=Request({CONFIG: ParcelBounds, f"{PARCEL}.*": Delivery}),
            ),
            Phase(
                TRAIN_POOL,
                "heads train",
                (TRAIN.plus(metrics=PoolMetrics),),
                "flwr_distill.strategies.hfldd.client:train_pool",
                request=Request({CONFIG: PoolRequest}, (ARRAYS,)),
                leaves="the model, trained on its samples and its members' virtual data",
                quorum=True,
                averaged="pool",
                own=(f"{CONFIG}.{LEFT_OUT}",),
            ),
            Phase(
                VOTE,
                "heads' models vote on virtual data",
                (Reply(metrics=VoteMetrics),),
                "flwr_distill.strategies.hfldd.client:vote",
                request=Request({CONFIG: VoteRequest}, (f"{VOTER}.*",)),
            ),
        ),
        needs="flwr_distill.strategies.hfldd.client:needs",
        unprotected=_unprotected,
        summed=(TRAIN_POOL,),
        formulas="flwr_distill.strategies.hfldd.traffic:formulas",
        panels=("flwr_distill.strategies.common.panels:virtual_data",),
        disclosed=_disclosed,
        defaults={
            "defence": {
                "aggregator": "agreement",
                "hfldd.rotate": False,
                "hfldd.complete-clusters": False,
            },
        },
    ),
)
