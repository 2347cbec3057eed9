"""Closed-form heads: messages between server and nodes, settings and declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.protocol.arrays import Arrays, as_record, finite_arrays
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import (
    MAX_NUMBER,
    EvaluateMetrics,
    Reply,
    Request,
    Share,
    TrainMetrics,
    TrainRequest,
)
from flwr_distill.task.settings import Block, TrainSettings

if TYPE_CHECKING:
    from flwr_distill.distill.analytic import Sums

TRAIN_SUMS = "train.analytic_sums"
"""Have a node sum the features of its samples."""

EVALUATE_OWN = "evaluate.own_head"
"""Have a node mix the sums of all with its own, and evaluate the head of both."""

SUMS = "sums"
"""Array record of a reply: the sums of a node; of a message to evaluate: those of all.

In secure sums it has what a sample adds to them on average; see `means_of`."""
FINE = 2.0**15
"""Factor of means of at most 1 under masks, where numbers are rounded to a millionth."""
GRAM = "gram"
"""Upper triangle of the sum of ``x x^T``, row by row, in whole units, int32 (k (k + 1) / 2,): as
short as float32, but 256 times as precise for the largest, of which errors of the head come."""
UNIT = "unit"
"""Unit of these, float64 (1,)."""
BY_CLASS = "by-class"
"""Sum of the features of each class, float64 (classes, k)."""
COUNTS = "counts"
"""Samples of each class, float64 (classes,)."""

_TYPES = {GRAM: "int32", UNIT: "float64", BY_CLASS: "float64", COUNTS: "float64"}
LARGEST = 2**31 - 1
ROUNDING = 1e-3
"""Samples of a class by which sums under masks may be off."""

FEATURES = "features"
"""Config record of a train message: which features to sum."""


class SummedFeatures(Block):
    """Which features nodes sum; also the request for it."""

    projection: Annotated[int, Field(ge=0)] = 0
    """Random directions that features are projected onto before they are summed, the same on all
    nodes; fewer are fewer bytes. 0 sums the features themselves."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which each sample's features, projected or not, are clipped in the sums. Those of our
    frozen networks have norm 1."""


class SumsRequest(SummedFeatures):
    """Which features a node sums, and the shape of the sums."""

    classes: Annotated[int, Field(ge=1, le=2**16)]
    """Of the task."""
    width: Annotated[int, Field(ge=1, le=2**16)]
    """Features of the network."""


class AnalyticSettings(SummedFeatures):
    """Settings of the closed-form heads (``analytic.*``)."""

    head: Literal["ridge", "lda"] = "ridge"
    """``ridge`` (least squares on one-hot labels) or ``lda`` (linear discriminant analysis)."""
    regularisation: Annotated[float, Field(ge=0)] = 0.0
    """Penalty lambda of ``ridge``, in units of summed squared features; or shrinkage of ``lda``, at
    most 1. 0 chooses it from the sums."""
    personal: Annotated[float, Field(ge=0)] = 0.0
    """How much more a node's own samples count in a head of its own, beside once in the sums of
    all. Above 0, nodes evaluate theirs on their held-out samples; it stays there."""

    @field_validator("regularisation")
    @classmethod
    def _is_a_shrinkage(cls, strength: float, info: ValidationInfo) -> float:
        if info.data.get("head") == "lda" and strength > 1:
            raise ValueError("lda takes 1 at most (0 chooses)")
        return strength

    def request(self, classes: int, width: int) -> SumsRequest:
        """The request to nodes."""
        features = self.model_dump(include=set(SummedFeatures.model_fields))
        return SumsRequest(**features, classes=classes, width=width)


class OwnHeadMetrics(EvaluateMetrics):
    """Accuracy and loss of a node's own head, and the accuracy of the one that all share."""

    shared_accuracy: Share


def record_of(sums: Sums) -> ArrayRecord:
    """Record of a node's sums."""
    upper = sums.gram[np.triu_indices(len(sums.gram))]
    unit = max(float(np.abs(upper).max()), np.finfo(np.float64).tiny) / LARGEST
    return as_record(
        {
            GRAM: np.round(upper / unit).astype(np.int32),
            UNIT: np.array([unit]),
            BY_CLASS: sums.by_class,
            COUNTS: sums.counts,
        }
    )


def sums_of(arrays: Arrays) -> Sums:
    """Sums from the arrays of a record."""
    from flwr_distill.distill.analytic import Sums  # here: the package imports torch

    k = arrays[BY_CLASS].shape[1]
    gram = np.zeros((k, k))
    gram[np.triu_indices(k)] = np.multiply(arrays[GRAM], arrays[UNIT])
    gram += np.triu(gram, 1).T
    by_class, counts = (np.array(arrays[name], np.float64) for name in (BY_CLASS, COUNTS))
    return Sums(gram, by_class, counts)


def means_of(sums: Sums, samples: int, settings: SummedFeatures, noise: float) -> ArrayRecord:
    """Record of a node's sums over so many samples for a secure sum, whose mean weighs by samples.

    They are shares of the most that a sample can add, and large, so that rounding costs a head
    nothing. With noise they may be larger, and rounding does not matter.
    """
    clip, each = settings.clip, _factor(noise) / samples
    return as_record(
        {
            GRAM: sums.gram[np.triu_indices(len(sums.gram))] * (each / clip**2),
            BY_CLASS: sums.by_class * (each / clip),
            COUNTS: sums.counts * each,
        }
    )


def sums_of_means(arrays: Arrays, samples: int, settings: SummedFeatures, noise: float) -> Sums:
    """Sums over so many samples from `means_of`.

    Without noise, counts next to whole numbers are whole, and classes without samples have no sums.
    """
    clip, each = settings.clip, samples / _factor(noise)
    sums = sums_of({**arrays, UNIT: np.array([each * clip**2])})
    counts, by_class = sums.counts * each, sums.by_class * (each * clip)
    if noise:
        return replace(sums, by_class=by_class, counts=counts)
    whole = np.rint(counts)
    counts = np.where(np.abs(counts - whole) < ROUNDING, whole, counts)
    return replace(sums, by_class=by_class * (counts[:, None] > 0), counts=counts)


def _factor(noise: float) -> float:
    return 1.0 if noise else FINE


def _summed(content: RecordDict, model: Arrays) -> Mapping[str, Arrays]:
    """Arrays like those of `means_of`; they take no memory, whatever the server asks for."""
    request = SumsRequest.checked(content.config_records[FEATURES], "message")
    classes, k = request.classes, request.projection or request.width
    shapes = {GRAM: (k * (k + 1) // 2,), BY_CLASS: (classes, k), COUNTS: (classes,)}
    return {SUMS: {name: np.broadcast_to(0.0, shape) for name, shape in shapes.items()}}


def check_sums(record: ArrayRecord) -> None:
    """Raise ValueError unless a node's sums have the form that `record_of` gives them."""
    if record.keys() != _TYPES.keys():
        raise ValueError(f"its sums are not {', '.join(_TYPES)}")
    arrays = finite_arrays(record)
    if arrays[BY_CLASS].ndim != 2:
        raise ValueError(f"its {BY_CLASS} have shape {arrays[BY_CLASS].shape}, not (classes, k)")
    classes, k = arrays[BY_CLASS].shape
    shapes = {GRAM: (k * (k + 1) // 2,), UNIT: (1,), BY_CLASS: (classes, k), COUNTS: (classes,)}
    for name, shape in shapes.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != _TYPES[name]:
            raise ValueError(
                f"its {name} are {array.dtype} {array.shape}, not {_TYPES[name]} {shape}"
            )
        if name != GRAM and np.abs(array).max(initial=0) > MAX_NUMBER:
            raise ValueError(f"its {name} are beyond {MAX_NUMBER:.0e}")


def _check_sums(record: ArrayRecord, model: Arrays) -> None:
    check_sums(record)


def _unprotected(settings: AnalyticSettings, train: TrainSettings) -> str:
    if settings.head == "lda":
        return "lda has no rule for sums with noise (set analytic.head to ridge)"
    if settings.personal:
        return (
            "nodes say how accurate heads of their own sums are, which have no noise (set "
            "analytic.personal to 0)"
        )
    return ""


def _disclosed(settings: AnalyticSettings) -> str:
    return (
        "Nodes sent sums over their samples' features, and how many samples they hold of each "
        "class; without secure-sums the server saw those of each node. Without noise "
        "(train.dp-noise), the sums of a single sample are its features."
    )


METHODS = (
    Method(
        name="analytic",
        strategy="flwr_distill.strategies.analytic.strategy:Analytic",
        summary="One round: a linear head in closed form, from sums of frozen features.",
        settings=AnalyticSettings,
        phases=(
            Phase(
                TRAIN_SUMS,
                "nodes sum their features",
                (Reply(metrics=TrainMetrics, arrays={SUMS: _check_sums}),),
                "flwr_distill.strategies.analytic.client:send_sums",
                request=Request({CONFIG: TrainRequest, FEATURES: SumsRequest}),
                leaves="sums over its samples' features and their products, and samples by class",
                quorum=True,
                summed=_summed,
            ),
            Phase(
                EVALUATE_OWN,
                "nodes evaluate heads of their own",
                (Reply(metrics=OwnHeadMetrics),),
                "flwr_distill.strategies.analytic.client:evaluate_own",
                request=Request({FEATURES: AnalyticSettings}, (SUMS,)),
                leaves="accuracies and loss on held-out samples of heads of all sums and its own",
            ),
        ),
        unprotected=_unprotected,
        summed=(TRAIN_SUMS,),
        outcome="solved",
        disclosed=_disclosed,
    ),
)
