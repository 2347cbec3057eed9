"""Aggregates a round, unless the result has NaN or infinity."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from flwr_distill.protocol.arrays import not_finite
from flwr_distill.server.record.packing import Arrays, pack, unpack
from flwr_distill.server.record.resume import load_state, state_of

AggregateTrain = Callable[[int, Iterable[Message]], tuple[ArrayRecord | None, MetricRecord | None]]
"""A strategy's ``aggregate_train``."""


@dataclass(frozen=True)
class Aggregate:
    """A strategy's result of a round."""

    arrays: ArrayRecord | None  # the new model; None if there is none
    metrics: MetricRecord | None  # aggregated metrics of the nodes
    broken: tuple[str, ...] = ()  # what was not finite; the strategy then forgot the round


def aggregate_finite(
    strategy: Strategy, aggregate: AggregateTrain, server_round: int, replies: Iterable[Message]
) -> Aggregate:
    """Aggregate replies; restore the strategy's state if the result is not finite."""
    before, values = _packed_state(strategy)
    values = deepcopy(values)
    arrays, metrics = aggregate(server_round, replies)
    broken = [f"the new model's {name}" for name in (not_finite(arrays) if arrays else ())]
    if _finite(values) and not _finite(_packed_state(strategy)[1]):
        broken.append("the strategy's new state")
    if not broken:
        return Aggregate(arrays, metrics)
    load_state(strategy, unpack(before, values))
    return Aggregate(None, None, tuple(broken))


def _packed_state(strategy: Strategy) -> tuple[Any, Arrays]:
    """A strategy's state, as in a checkpoint: an ArrayRecord that was sent cannot be copied."""
    arrays: Arrays = {}
    return pack(state_of(strategy), arrays), arrays


def _finite(arrays: Arrays) -> bool:
    return all(np.isfinite(array).all() for array in arrays.values())
