"""FedHEAD and FedHEAD+: messages between server, leaders and members, settings, declarations."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from flwr_distill.links.records import Delivery, Parcel, Route
from flwr_distill.protocol.meeting import MAX_REASON
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    PARCEL,
    PARCEL_CODEC,
    ROUTE,
)
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.parcels import ParcelCoding
from flwr_distill.protocol.schema import (
    Count,
    LinkReport,
    PrivacyMetrics,
    Reply,
    Request,
    TrainMetrics,
    TrainRequest,
    like_the_model,
)
from flwr_distill.strategies.common.ensemble import EnsembleDistillation
from flwr_distill.strategies.common.robust import Rule
from flwr_distill.task.auxiliary_names import check_auxiliary
from flwr_distill.task.settings import Block, RunConfigValue, TrainSettings

TRAIN_SECTOR = "train.sector"
"""Have a node train and send its model to the leader of its sector (step 1)."""

HAND_OUT = "train.hand_out"
"""Have a sector's leader hand the global model to its members (step 5)."""

HAND_IN = "train.hand_in"
"""Have a member send its trained model again, to the new leader of its sector."""

AGGREGATE_SECTOR = "train.aggregate_sector"
"""Have a sector's leader average what its members trained (step 2)."""

DISTILL_SECTOR = "train.distill_sector"
"""Have a sector's leader distil its members' ensemble into the global model (step 4)."""

LEADS = "leads"
"""Config key of a train message: whether the node leads its sector, and keeps its model."""

MIN_GAIN = "least-gain"
"""Config key of the request to distil; see `FedHEADSettings`."""

RULE = "rule"
"""Config key of the request to average: how; a :data:`strategies.common.robust.Rule`."""

LONGEST = "longest"
"""Config key of the request to average: the norm beyond which no update counts by ``agreement``."""

UPDATE_NORM = "update-norm"
"""Metric of a node that trained: the norm of its update, which the server does not see."""

SECTOR_MODEL = "sector-model"
"""Purpose of a parcel: a model that a member trained, for its leader (step 1)."""

GLOBAL_MODEL = "global-model"
"""Purpose of a parcel: the global model, from a leader to its members (step 5)."""


class FedHEADSettings(EnsembleDistillation):
    """Settings of FedHEAD, FedHEAD+ and FedDF (``fedhead.*``)."""

    sectors: Annotated[int, Field(ge=1)] = 2
    """M, number of sectors if nodes do not declare theirs."""
    fixed_leader: bool = False
    """Whether the node with most data leads its sector in every round."""
    least_classes: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Share of its sector's classes that a leader must hold to distil; the sector of another keeps
    its plain average, since a student forgets what it never sees. Nodes that do not tell their
    classes (with differential privacy) distil. 0 is the paper's."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A leader distils only where the ensemble predicts its samples better than the mean of all
    sectors does: by this share of the loss, at least. Otherwise its sector keeps its plain average,
    since distilling would only add the leader's own bias. 0 is the paper's: leaders always
    distil."""
    rule: Rule = "mean"
    """How leaders average sectors of five or more: ``mean``, ``agreement`` (without models that are
    out of line, none much longer than the median of its sector and of all nodes), ``multi-krum`` or
    ``trimmed-mean``. With ``agreement`` the server leaves out nodes that tell a far longer update
    than most. With any but the mean, students that point away from those of other sectors do not
    count."""
    audit: bool = False
    """Whether up to four members average again where a leader's mean points away from those of
    other sectors, or there are none."""
    server_epochs: Annotated[int, Field(ge=1)] = 20
    """n_g, most epochs of the distillation on the server (FedHEAD+, FedDF)."""
    reference: Annotated[str, AfterValidator(check_auxiliary)] = "noise"
    """Reference set of that distillation: ``noise``, ``cifar100``, ``fashion-mnist``,
    ``tiny-imagenet``, ``reserved`` for training samples that no node gets
    (``partition.reserved``), or a folder or npz that is on the server."""
    reference_size: Annotated[int, Field(ge=2)] = 1000
    """Samples of the reference set."""

    @property
    def ensemble_distillation(self) -> EnsembleDistillation:
        """The request to leaders."""
        fields = set(EnsembleDistillation.model_fields)
        return EnsembleDistillation(**self.model_dump(include=fields))

    @property
    def server_distillation(self) -> EnsembleDistillation:
        """What the server does; all but its epochs as leaders do."""
        return self.ensemble_distillation.model_copy(update={"distill_epochs": self.server_epochs})


class SectorRequest(TrainRequest):
    """Config of a message to train: whether the node leads its sector."""

    leads: bool = False


class AverageRequest(Block):
    """Config of the request to average a sector.

    Beside the fields, ``num-examples.<rank>`` and ``update-norm.<rank>`` of each member.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    server_round: Annotated[int, Field(ge=0)]
    rule: Rule = "mean"
    longest: Annotated[float, Field(ge=0)] | None = None
    __pydantic_extra__: dict[
        Annotated[str, Field(pattern=r"^(num-examples|update-norm)\.[0-9]+$")],
        Annotated[int | float, Field(ge=0)],
    ]


class DistillSectorRequest(EnsembleDistillation):
    """Config of the request to distil a sector's ensemble."""

    server_round: Annotated[int, Field(ge=0)]
    least_gain: Annotated[float, Field(ge=0, lt=1)]


class TrainSectorMetrics(TrainMetrics):
    """Metrics of local training, and the norm of the update."""

    train_loss: float
    update_norm: Annotated[float, Field(ge=0)]


class RejectedModels(Block):
    """Why a leader rejected models: a text per ``rejected.<rank>``."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _are_reasons(self) -> "RejectedModels":
        for key, reason in (self.model_extra or {}).items():
            stem, _, rank = key.partition(".")
            is_reason = isinstance(reason, str) and len(reason) <= MAX_REASON
            if stem != "rejected" or not rank.isdecimal() or not is_reason:
                raise ValueError(f"{key[:20]} is not a reason for a rejected model")
        return self


class DistillSectorMetrics(PrivacyMetrics):
    """Loss of a leader's distillation on the held-out part, in nats, and its epochs.

    Without a loss the leader has not distilled, and sends no model.
    """

    distill_loss: float | None = None
    distill_epochs: Count


PHASES = (
    Phase(
        TRAIN_SECTOR,
        "nodes train for their sector",
        (
            Reply(
                metrics=TrainSectorMetrics,
                configs={PARCEL: Parcel, CONFIG: LinkReport},
                optional={PARCEL, CONFIG},
            ),
        ),
        "flwr_distill.strategies.fedhead.client:train_sector",
        request=Request(
            {
                CONFIG: SectorRequest,
                ROUTE: Route,
                DELIVERY: Delivery,
                PARCEL_CODEC: ParcelCoding,
            },
            (ARRAYS,),
        ),
        leaves="the model, trained on its samples, sealed for the sector's leader",
        quorum=True,
        averaged="own",
    ),
    Phase(
        HAND_OUT,
        "leaders hand the model to their members",
        (Reply(configs={f"{PARCEL}.*": Parcel}),),
        "flwr_distill.strategies.fedhead.client:hand_out",
        request=Request({f"{ROUTE}.*": Route, PARCEL_CODEC: ParcelCoding}, (ARRAYS,)),
    ),
    Phase(
        HAND_IN,
        "members send again to a new leader",
        (Reply(configs={PARCEL: Parcel, CONFIG: LinkReport}, optional={PARCEL, CONFIG}),),
        "flwr_distill.strategies.fedhead.client:hand_in",
        request=Request({ROUTE: Route, PARCEL_CODEC: ParcelCoding}),
        leaves="the model, trained on its samples, sealed for the sector's leader",
    ),
    Phase(
        AGGREGATE_SECTOR,
        "leaders average their sector",
        (Reply(arrays={ARRAYS: like_the_model}, configs={CONFIG: RejectedModels}),),
        "flwr_distill.strategies.fedhead.client:aggregate_sector",
        request=Request({CONFIG: AverageRequest, f"{DELIVERY}.*": Delivery}),
        leaves="the mean of its sector's models",
    ),
    Phase(
        DISTILL_SECTOR,
        "leaders distil their sector's ensemble",
        (
            Reply(
                metrics=DistillSectorMetrics,
                arrays={ARRAYS: like_the_model},
                optional={ARRAYS},
            ),
        ),
        "flwr_distill.strategies.fedhead.client:distill_sector",
        request=Request({CONFIG: DistillSectorRequest}, (ARRAYS,)),
        leaves="the model, distilled on its samples",
        needed=True,
    ),
)


def _unprotected(settings: FedHEADSettings, train: TrainSettings) -> str:
    return "leaders distil on their data, without differential privacy (take another strategy)"


_DEFAULTS: dict[str, dict[str, RunConfigValue]] = {
    "defence": {"fedhead.rule": "agreement", "fedhead.audit": True},
    "edge": {"fedhead.sectors": 1},
}

METHODS = (
    Method(
        name="fedhead",
        strategy="flwr_distill.strategies.fedhead.strategy:FedHEAD",
        summary="Sector leaders aggregate and distil their members' ensemble into the model.",
        settings=FedHEADSettings,
        phases=PHASES,
        unprotected=_unprotected,
        defaults=_DEFAULTS,
        formulas="flwr_distill.strategies.fedhead.strategy:formulas",
    ),
    Method(
        name="fedhead-plus",
        strategy="flwr_distill.strategies.fedhead.plus:FedHEADPlus",
        summary="FedHEAD, and one more distillation at the server.",
        settings=FedHEADSettings,
        table="fedhead",
        phases=PHASES,
        unprotected=_unprotected,
        defaults=_DEFAULTS,
        formulas="flwr_distill.strategies.fedhead.strategy:formulas",
    ),
)
