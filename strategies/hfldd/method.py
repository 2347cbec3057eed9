"""HFLDD: messages between server and nodes, settings and declaration."""

from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator

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
    TrainRequest,
)
from flwr_distill.task.auxiliary_names import check_auxiliary
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
LEFT_OUT = "left-out"
"""Config keys of a head's train message, see `PoolRequest`."""

VOTES = "votes"
KEPT_PARCELS = "kept-parcels"
NUM_PARCELS = "num-parcels"
OWN_DIVERGENCE = "own-divergence"
"""Metrics, see `VoteMetrics`, `ReceiveMetrics`, `PoolMetrics` and `LabelKnowledgeMetrics`."""


class LabelKnowledge(Block):
    """Soft labels on a global auxiliary set (HFLDD, step 1)."""

    initial_steps: Annotated[int, Field(ge=1)] = 10
    """E_1, SGD steps of the initial model before soft labels are taken."""
    initial_lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of these steps."""
    initial_batch_size: Annotated[int, Field(ge=1)] = 64
    """Minibatch of these steps."""
    auxiliary: Annotated[str, AfterValidator(check_auxiliary)] = "noise"
    """Global auxiliary set D_g, which every node builds for itself: ``noise``, ``fashion-mnist``,
    ``tiny-imagenet``, or a folder or npz that is on every node, or ``@NAME`` for what nodes' owners
    call so."""
    auxiliary_size: Annotated[int, Field(ge=1)] = 1000
    """|D_g|, its number of samples."""


class LabelRequest(LabelKnowledge):
    """The request for soft labels."""

    own_divergence: bool = False
    """Whether to add the divergence between two random halves of the node's data. Nodes do not with
    differential privacy, which does not cover it."""


class Distillation(Block):
    """Distillation of a node's data (HFLDD, step 4)."""

    distiller: Annotated[str, Field(min_length=1)] = "auto"
    """``dm`` for images from 16 pixels a side on, and for smaller ones where a node has few
    classes; ``kip`` (the paper's) for smaller ones of most classes, ``kip-negatives`` of a single
    class; ``auto`` chooses so. Also a plug-in's name, or ``module:function``."""
    distilled_size: Annotated[int, Field(ge=1)] = 40
    """|D~_i|, virtual samples of a node, spread evenly over its classes."""
    distill_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the distiller; 0 takes the distiller's own default."""
    formation: Annotated[int, Field(ge=0, le=4)] = 0
    """Each virtual image holds formation x formation smaller ones, which are enlarged where they
    are trained on and cost no more bytes; 1 is one image, 0 lets the distiller choose."""
    bits: Annotated[int, Field(ge=1, le=8)] = 4
    """B_2, bits of a pixel of the virtual images that are sent. The parcel is packed without loss
    besides."""
    kip_lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of ``kip`` and ``kip-negatives``."""
    kip_batch_size: Annotated[int, Field(ge=1)] = 256
    """Real samples that each of their steps predicts, drawn for each step."""
    kip_lambda: Annotated[float, Field(gt=0)] = 1e-6
    """lambda of eq. 1, the ridge of their regression."""
    kip_relative: bool = True
    """Whether lambda is multiplied by the mean of K_SS' diagonal; if not, it is added unchanged, as
    eq. 1 is printed."""
    network: str = ""
    """Network whose features ``dm`` matches in place of random ones', ``module:Class`` of a package
    that is on every node; called without arguments."""
    network_weights: str = ""
    """Safetensors file with its weights, on every node; or ``@NAME``."""
    start: Annotated[str, Field(min_length=1)] = "class-stats"
    """What virtual images start from: ``class-stats``, ``pixel-stats``, ``noise`` or ``real``."""
    allow_real_start: Annotated[bool, Field(validate_default=True)] = False
    """Permission for ``start = "real"``: real images then leave the node nearly unchanged."""
    share_raw_data: bool = False
    """The paper's "w/o DD" ablation: raw data in place of virtual data. Gives up privacy."""
    dp_epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Epsilon that the virtual data cost each sample, by distribution matching with differentially
    private class means, at ``train.dp-delta``; 0 distils without differential privacy."""

    @property
    def bits_sent(self) -> int:
        """B_2 of what members send: raw data keep their 8 bits."""
        return 8 if self.share_raw_data else self.bits

    @field_validator("distiller")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if ":" not in name:  # a function of a package may be on nodes only
            from flwr_distill.distill import DistillError, distiller  # here: imports torch

            try:
                distiller(name)
            except DistillError as error:
                raise ValueError(str(error)) from None
        return name

    @field_validator("network")
    @classmethod
    def _is_taken(cls, name: str, info: ValidationInfo) -> str:
        method = info.data.get("distiller", ":")
        if name and ":" not in method:
            from flwr_distill.distill.own_network import takes_network  # here: imports torch

            if not takes_network(method):
                raise ValueError(f"distiller = {method!r} takes none (take dm)")
        return name

    @field_validator("network_weights")
    @classmethod
    def _are_of_a_network(cls, weights: str, info: ValidationInfo) -> str:
        if weights and not info.data.get("network", True):
            raise ValueError("are of no network (name it by network)")
        return weights

    @field_validator("start")
    @classmethod
    def _is_a_start(cls, name: str) -> str:
        from flwr_distill.distill.starts import REAL, STARTS  # here: imports torch

        if name not in (*STARTS, REAL):
            raise ValueError(f"must be one of {', '.join((*STARTS, REAL))}")
        return name

    @field_validator("allow_real_start")
    @classmethod
    def _permits_start(cls, allowed: bool, info: ValidationInfo) -> bool:
        if info.data.get("start") == "real" and not allowed:
            raise ValueError(
                'must be true for start = "real", with which real images leave the node nearly '
                "unchanged (allow it, or take start = class-stats)"
            )
        return allowed

    @field_validator("dp_epsilon")
    @classmethod
    def _is_private_all_through(cls, epsilon: float, info: ValidationInfo) -> float:
        if not epsilon:
            return epsilon
        others = info.data
        if (distiller := others.get("distiller")) not in ("auto", "dm"):
            raise ValueError(f"distiller = {distiller!r} has no differential privacy (take dm)")
        if (start := others.get("start")) != "noise":
            raise ValueError(f"start = {start!r} would leak the real images (take noise)")
        if others.get("share_raw_data"):
            raise ValueError("share-raw-data sends the real images (set it to false)")
        if network := others.get("network"):
            raise ValueError(f"network = {network!r} has no differential privacy (leave it out)")
        return epsilon


class Refinement(Block):
    """Request to refine virtual data with the global model before they are sent again."""

    server_round: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    """Steps of distribution matching with the model's features."""


class ParcelBounds(Block):
    """What a head accepts from a member (HFLDD, step 4)."""

    images: Annotated[int, Field(ge=1)]
    """Most images in a parcel."""
    of_a_class: Annotated[int, Field(ge=1)]
    """Most images of one class."""
    formation: Annotated[int, Field(ge=1, le=4)] = 1
    """Largest formation."""
    server_round: Annotated[int, Field(ge=1)]
    """The round in which the parcels were sent."""


class PoolRequest(TrainRequest):
    """Config of a message to a head to train on D_h."""

    balanced: bool = False
    """Whether classes are drawn evenly."""
    average_last: Share = 0.0
    """Share of its steps over which it averages its weights."""
    left_out: list[Count] = Field(default_factory=list)
    """Ranks of the members whose virtual data were voted out."""


class VoteRequest(Block):
    """Config of the request for votes: ranks of the members with new virtual data.

    Also ``known.<place>``, the classes that each voter may judge.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    ranks: list[Count]
    __pydantic_extra__: dict[Annotated[str, Field(pattern=r"^known\.[0-9]+$")], list[Count]]


class HFLDDSettings(LabelKnowledge, Distillation):
    """Settings of HFLDD (``hfldd.*``): those of both requests to nodes, and the server's own."""

    groups: Annotated[int, Field(ge=0)] = 0
    """K, the homogeneous groups; 0 takes the K with the best silhouette, at most the number of
    classes."""
    balanced: bool = True
    """Whether heads draw classes evenly from D_h."""
    votes: bool = False
    """Whether models of other heads vote on virtual data; heads leave out what is voted out. Only
    without ``rotate`` and ``complete-clusters``."""
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
        if every and info.data.get("share_raw_data"):
            raise ValueError("there is nothing to refine in raw data (set it to 0)")
        if every and info.data.get("dp_epsilon"):
            raise ValueError("refining has no differential privacy (set it to 0)")
        return every

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
    if settings.balanced:
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
