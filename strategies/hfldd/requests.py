"""What HFLDD's server requests of nodes."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator

from flwr_distill.protocol.schema import Count, Share, TrainRequest
from flwr_distill.task.auxiliary_names import check_auxiliary
from flwr_distill.task.settings import Block


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
    virtual_share: Share = 1.0
    """Share of the received virtual data to train on, drawn in each round."""
    left_out: list[Count] = Field(default_factory=list)
    """Ranks of the members whose virtual data were voted out."""


class VoteRequest(Block):
    """Config of the request for votes: ranks of the members with new virtual data.

    Also ``known.<place>``, the classes that each voter may judge.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    ranks: list[Count]
    __pydantic_extra__: dict[Annotated[str, Field(pattern=r"^known\.[0-9]+$")], list[Count]]
