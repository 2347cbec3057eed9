"""VHL: settings, request to nodes and declaration."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from flwr_distill.protocol.method import TRAIN_PHASE, Method
from flwr_distill.protocol.schema import TRAIN_REQUEST
from flwr_distill.task.settings import Block, TrainSettings

VIRTUAL_TASK = "virtual-task"
"""Name of the record that asks nodes to learn virtual images too."""


class VHLSettings(Block):
    """Settings of VHL (``vhl.*``)."""

    images: Literal["noise", "stylegan"] = "noise"
    """Virtual images: smooth ``noise`` around a pattern of their class, or those of an untrained
    ``stylegan``, as in the paper."""
    per_class: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Virtual images of each class."""
    virtual_batch: Annotated[int, Field(ge=2)] = 128
    """Virtual images in each step of a node."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the cross-entropy on virtual images."""
    alignment: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive loss that pulls a node's samples to virtual images of their
    class."""
    contrast: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the contrastive loss among virtual images."""


class VirtualTaskRequest(VHLSettings):
    """The request to nodes."""

    seed: Annotated[int, Field(ge=0)]
    """Seed of the virtual images, the same for all nodes."""


def _unprotected(settings: VHLSettings, train: TrainSettings) -> str:
    return (
        "VHL aligns the samples of a minibatch with each other, so that they have no gradients of "
        "their own (take another strategy)"
    )


METHOD = Method(
    name="vhl",
    strategy="flwr_distill_baselines.vhl.strategy:VHL",
    summary="Nodes learn shared images of noise too, and align their features with these.",
    settings=VHLSettings,
    phases=(replace(TRAIN_PHASE, request=TRAIN_REQUEST.plus({VIRTUAL_TASK: VirtualTaskRequest})),),
    terms={VIRTUAL_TASK: "flwr_distill_baselines.vhl.client:VirtualTask"},
    unprotected=_unprotected,
)
