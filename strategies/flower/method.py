"""Flower's own strategies by name: settings and declarations."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.protocol.messages import ARRAYS, CLIPPING_NORM, CONFIG
from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.schema import TRAIN, Request, TrainMetrics, TrainRequest
from flwr_distill.task.settings import Block, TrainSettings

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NumNodes = Annotated[int, Field(ge=0)]


class FedAvgMSettings(Block):
    """Settings of FedAvgM (``fedavgm.*``)."""

    server_learning_rate: Positive = 1.0
    """Step of the server along the mean update."""
    server_momentum: Decay = 0.9
    """Share of the last step that the next one keeps; 0 is FedAvg."""


class FedAdagradSettings(Block):
    """Settings of FedAdagrad (``fedadagrad.*``)."""

    eta: Positive = 0.1
    """Learning rate of the server."""
    tau: Positive = 1e-3
    """What is added to the divisor; larger is less adaptive."""


class FedAdamSettings(FedAdagradSettings):
    """Settings of FedAdam (``fedadam.*``)."""

    beta_1: Decay = 0.9
    """Decay of the mean update."""
    beta_2: Decay = 0.99
    """Decay of its square."""


class FedYogiSettings(FedAdamSettings):
    """Settings of FedYogi (``fedyogi.*``)."""

    eta: Positive = 0.01
    """Learning rate of the server."""


class QFedAvgSettings(Block):
    """Settings of q-FedAvg (``qfedavg.*``)."""

    q: NotNegative = 0.1
    """How much more nodes with a high loss weigh; 0 weighs all nodes alike."""


class FedTrimmedAvgSettings(Block):
    """Settings of FedTrimmedAvg (``fedtrimmedavg.*``)."""

    beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the nodes to leave out at each end of each value."""


class KrumSettings(Block):
    """Settings of Krum (``krum.*``)."""

    num_malicious_nodes: NumNodes = 0
    """Hostile nodes to expect."""


class MultiKrumSettings(KrumSettings):
    """Settings of MultiKrum (``multikrum.*``)."""

    num_nodes_to_select: Annotated[int, Field(ge=1)] = 1
    """Nodes whose models are averaged."""


class BulyanSettings(KrumSettings):
    """Settings of Bulyan (``bulyan.*``), which needs ``4 * num-malicious-nodes + 3`` nodes."""


class FixedClippingSettings(Block):
    """Settings of central differential privacy with a fixed clipping norm (``dp-fixed.*``)."""

    noise_multiplier: NotNegative = 1.0
    """Deviation of the noise on the sum of the updates, in clipping norms."""
    clipping_norm: Positive = 1.0
    """Longest update of a node."""


class AdaptiveClippingSettings(Block):
    """Settings of central differential privacy whose clipping norm adapts (``dp-adaptive.*``)."""

    noise_multiplier: NotNegative = 1.0
    """Deviation of the noise that the whole is worth, in clipping norms."""
    initial_clipping_norm: Positive = 0.1
    """Longest update of a node in the first round."""
    target_clipped_quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the updates that the norm should not clip."""
    clip_norm_lr: Positive = 0.2
    """How fast the norm adapts."""
    clipped_count_stddev: Annotated[float, Field(ge=0, validate_default=True)] = 1.0
    """Deviation of the noise on the count of clipped updates, more than half of
    ``noise-multiplier``."""

    @field_validator("clipped_count_stddev")
    @classmethod
    def _leaves_noise_for_updates(cls, stddev: float, info: ValidationInfo) -> float:
        noise = info.data.get("noise_multiplier", 0.0)
        if noise and noise >= 2 * stddev:
            raise ValueError(f"must be above half of noise-multiplier = {noise:g} (raise it)")
        return stddev


class ClippedMetrics(TrainMetrics):
    """Metrics of local training by a node that clips its update: whether it had to."""

    norm_bit: Annotated[int, Field(alias="norm_bit", ge=0, le=1)]


class ClippedRequest(TrainRequest):
    """Config of a message to train: the longest update that the node may send."""

    clipping_norm: Annotated[float, Field(alias=CLIPPING_NORM, gt=0)]


class LossMetrics(TrainMetrics):
    """Metrics of local training whose loss the rule needs."""

    train_loss: NotNegative


def _losses_are_private(settings: Any, train: TrainSettings) -> str:
    return (
        "q-FedAvg weighs nodes by their training loss, which they do not tell with differential "
        "privacy (set train.dp-noise to 0, or take another strategy)"
    )


_CLIPPED_TRAIN_PHASE = replace(
    TRAIN_PHASE,
    replies=(TRAIN.plus(metrics=ClippedMetrics),),
    request=Request({CONFIG: ClippedRequest}, (ARRAYS,)),
    leaves="the model, its update clipped, and whether it was longer",
)
_SUMMED = (TRAIN_PHASE.message_type,)
_SERVER_SIDE = "DifferentialPrivacyServerSide"
_CLIENT_SIDE = "DifferentialPrivacyClientSide"


def _fitted(name: str, summary: str, cls: str, settings: type[Block], **more: Any) -> Method:
    """Declare a class of `strategies.flower`; the others are Flower's as they are."""
    return Method(name, f"flwr_distill.strategies.flower.strategy:{cls}", summary, settings, **more)


METHODS = (
    Method(
        "fedavg",
        "flwr.serverapp.strategy.fedavg:FedAvg",
        "The mean of the nodes' models, weighted by their samples.",
        summed=_SUMMED,
        defaults={"defence": {"strategy": "agreement"}},
    ),
    Method(
        "fedmedian",
        "flwr.serverapp.strategy.fedmedian:FedMedian",
        "The median of the nodes' models.",
    ),
    Method(
        "fedtrimmedavg",
        "flwr.serverapp.strategy.fedtrimmedavg:FedTrimmedAvg",
        "The mean without the extremes of each value.",
        FedTrimmedAvgSettings,
    ),
    _fitted("krum", "The model that is nearest to its neighbours.", "Krum", KrumSettings),
    _fitted(
        "multikrum",
        "The mean of the models that are nearest to their neighbours.",
        "MultiKrum",
        MultiKrumSettings,
    ),
    _fitted(
        "bulyan",
        "Of the models nearest to their neighbours, the mean of the values nearest to the median.",
        "Bulyan",
        BulyanSettings,
    ),
    _fitted(
        "fedavgm",
        "FedAvg with momentum at the server.",
        "FedAvgM",
        FedAvgMSettings,
        summed=_SUMMED,
    ),
    _fitted(
        "fedadagrad", "Adagrad at the server.", "FedAdagrad", FedAdagradSettings, summed=("train",)
    ),
    _fitted("fedadam", "Adam at the server.", "FedAdam", FedAdamSettings, summed=_SUMMED),
    _fitted("fedyogi", "Yogi at the server.", "FedYogi", FedYogiSettings, summed=_SUMMED),
    _fitted(
        "qfedavg",
        "q-FedAvg: nodes with a high loss weigh more.",
        "QFedAvg",
        QFedAvgSettings,
        phases=(
            replace(
                TRAIN_PHASE,
                replies=(TRAIN.plus(metrics=LossMetrics),),
                leaves="the model, trained on its samples, and its training loss",
            ),
        ),
        unprotected=_losses_are_private,
    ),
    _fitted(
        "dp-fixed-server",
        "Mean with central differential privacy; the server clips updates.",
        f"{_SERVER_SIDE}FixedClipping",
        FixedClippingSettings,
        table="dp-fixed",
    ),
    _fitted(
        "dp-fixed-client",
        "Mean with central differential privacy; nodes clip their updates.",
        f"{_CLIENT_SIDE}FixedClipping",
        FixedClippingSettings,
        table="dp-fixed",
        phases=(_CLIPPED_TRAIN_PHASE,),
        unprotected=all_protected,
    ),
    _fitted(
        "dp-adaptive-server",
        "Mean with central differential privacy; the server clips by a norm that adapts.",
        f"{_SERVER_SIDE}AdaptiveClipping",
        AdaptiveClippingSettings,
        table="dp-adaptive",
    ),
    _fitted(
        "dp-adaptive-client",
        "Mean with central differential privacy; nodes clip by a norm that adapts.",
        f"{_CLIENT_SIDE}AdaptiveClipping",
        AdaptiveClippingSettings,
        table="dp-adaptive",
        phases=(_CLIPPED_TRAIN_PHASE,),
        unprotected=all_protected,
    ),
)
