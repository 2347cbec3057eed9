"""The declaration: settings, the phase and what may come back in it, and where the code is.

Both sides read this file, so it imports the code of neither.
"""

from typing import Annotated

import numpy as np
from flwr.app import ArrayRecord
from pydantic import Field

from flwr_distill.protocol.arrays import Arrays, finite_arrays
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import Count, Reply
from flwr_distill.task.settings import Block, TrainSettings

CLASS_MEANS = "query.class_means"
"""Ask a node for the mean features of its classes under the model in the message."""

ANCHORS = "class-anchors"
"""Record of a train message: the anchors ``means`` (C, d) and the ``pull`` (C,) to each."""

MEANS, COUNTS, PULL = "means", "counts", "pull"


class AnchorSettings(Block):
    """Settings of class anchors (``class-anchors.*``)."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of the loss term."""
    every: Annotated[int, Field(ge=1)] = 1
    """Rounds from one survey of the class means to the next; the first is before round 1."""
    fewest: Annotated[int, Field(ge=1)] = 5
    """Samples of a class that a node needs to report their mean."""


class Survey(Block):
    """What the server asks a node beside the model."""

    fewest: Annotated[int, Field(ge=1)]
    """See `AnchorSettings`."""


class SurveyMetrics(Block):
    """Numbers in a node's answer, which the run's journal keeps."""

    num_classes: Count
    """Classes whose mean it reports."""


def class_means_fit(record: ArrayRecord, model: Arrays) -> None:
    """Check a node's report on its classes: numbers from elsewhere are not trusted.

    Features are the input of the last dense layer, so the means of all classes are shaped as
    that layer's weights are.

    Raises
    ------
    ValueError
        If an array is missing, is of a wrong shape, or has impossible values.
    """
    arrays = finite_arrays(record)
    if set(arrays) != {MEANS, COUNTS}:
        raise ValueError(f"it needs {MEANS} and {COUNTS}, and brings {', '.join(sorted(arrays))}")
    means, counts = arrays[MEANS], arrays[COUNTS]
    if means.ndim != 2 or means.shape not in {weights.shape for weights in model.values()}:
        raise ValueError(f"its {MEANS} are {means.shape}, as no weights of this run's model are")
    if counts.shape != means.shape[:1] or counts.dtype != np.int64 or counts.min() < 0:
        raise ValueError(f"its {COUNTS} are not numbers of samples, one a class")


def _unprotected(settings: AnchorSettings, train: TrainSettings) -> str:
    return "nodes report class means and counts without noise (take another strategy)"


def _disclosed(settings: AnchorSettings) -> str:
    return (
        "Nodes reported how many samples they have of each class and, for classes with at "
        f"least {settings.fewest}, the mean of the model's features over them."
    )


METHOD = Method(
    name="class-anchors",
    strategy="class_anchors.strategy:ClassAnchors",
    summary="Nodes keep the features of a class near the federation's mean of it.",
    settings=AnchorSettings,
    phases=(
        Phase(
            CLASS_MEANS,
            "nodes report their class means",
            (Reply(metrics=SurveyMetrics, arrays={ARRAYS: class_means_fit}),),
            handler="class_anchors.client:report_class_means",
        ),
    ),
    terms={ANCHORS: "class_anchors.client:Anchored"},
    unprotected=_unprotected,
    disclosed=_disclosed,
    panels=("class_anchors.panel:survey",),
)
