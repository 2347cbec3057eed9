"""DynaFed: settings and declaration."""

from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import Method
from flwr_distill.task.settings import Block


class DynaFedSettings(Block):
    """Settings of DynaFed (``dynafed.*``)."""

    trajectory: Annotated[int, Field(ge=1)] = 25
    """Rounds whose global models the server keeps, also in checkpoints; after so many it
    distils."""
    per_class: Annotated[int, Field(ge=1)] = 15
    """Virtual images, as a multiple of the number of classes."""
    distill_steps: Annotated[int, Field(ge=1)] = 500
    """Steps in which the server learns images and labels (the published code: 3,000)."""
    follow_steps: Annotated[int, Field(ge=1)] = 20
    """Steps of SGD on virtual data that are to lead from a global model to a later one."""
    image_lr: Annotated[float, Field(gt=0)] = 0.05
    """Learning rate of the images."""
    tune_steps: Annotated[int, Field(ge=1)] = 20
    """Steps of Adam after each average, on 256 virtual images at most: with 15 of each of ten
    classes, so many epochs."""
    tune_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Their learning rate."""


METHOD = Method(
    name="dynafed",
    strategy="flwr_distill_baselines.dynafed.strategy:DynaFed",
    summary="FedAvg; the server distils its own trajectory, and tunes each average on that.",
    settings=DynaFedSettings,
    panels=("flwr_distill.strategies.common.panels:virtual_data",),
)
