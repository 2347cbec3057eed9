"""Schemas of requests to nodes and of their replies: which records, keys, types and ranges."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import Field

from flwr_distill.protocol.arrays import Arrays, finite_arrays, model_arrays
from flwr_distill.protocol.counts import COUNTS, CountsReport
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    Block,
    TrainSettings,
)

MAX_NUMBER = 1e15
"""Bound of the size of any number in a reply's metrics: sums over nodes stay finite and exact."""
MAX_VALUES = 10_000
"""Numbers in a reply's metrics, those in lists included; keys in its other records."""

Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Field(ge=0, le=1)]

ArrayCheck = Callable[[ArrayRecord, Arrays], object]
"""Raises ValueError if a record of arrays does not fit the model that was sent to the node."""


class PrivacyMetrics(Block):
    """Privacy budget that a node has spent; None without differential privacy."""

    dp_epsilon: Annotated[float, Field(ge=0)] | None = None
    dp_epsilon_of_all: Annotated[float, Field(ge=0)] | None = None
    dp_delta: Share | None = None


class TrainMetrics(PrivacyMetrics):
    """Metrics of local training. Loss and accuracy are None with differential privacy."""

    num_examples: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    num_steps: Count | None = None
    train_loss: float | None = None
    train_accuracy: Share | None = None


class EvaluateMetrics(Block):
    """Metrics of an evaluation on a node; the loss is in nats."""

    num_examples: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    eval_accuracy: Share
    eval_loss: float | None = None


class DistilledMetrics(Block):
    """Metrics sent with virtual data: how many, and their privacy card."""

    num_examples: Count
    highest_cosine: float | None = None
    median_cosine: float | None = None
    least_distance: float | None = None
    median_distance: float | None = None
    nearer_to_own: Share | None = None
    by_chance: Share | None = None


class SentData(Block):
    """A node's virtual data, by :meth:`distill.virtual_data.VirtualData.to_bytes`."""

    payload: bytes


class LinkReport(Block):
    """Config of a reply whose parcel could not be sent: why."""

    link_error: Annotated[str, Field(max_length=2000)]


class NoMetrics(Block):
    """An empty record, or none."""


class TrainRequest(TrainSettings):
    """Config of a message to train: settings that override the run's, and the round."""

    server_round: Annotated[int, Field(ge=0)] = 0
    """The round."""


class Pace(Block):
    """Record ``pace`` of any message, for the node's process: seconds between its polls."""

    poll_every: Annotated[float, Field(ge=0)] = 0.0


class EvaluateRequest(Block):
    """Config of a message to evaluate: the round."""

    server_round: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Request:
    """Records that a message to a node may contain, any of which may be missing.

    Parameters
    ----------
    configs : Mapping[str, type[Block]]
        Keys, types and ranges of each config record, by name. ``route.*`` matches ``route.1`` and
        so on.
    arrays : Collection[str]
        Names of array records: models and means, which nodes read as such.
    """

    configs: Mapping[str, type[Block]] = field(default_factory=dict)
    arrays: Collection[str] = ()

    def plus(
        self, configs: Mapping[str, type[Block]] | None = None, arrays: Collection[str] = ()
    ) -> "Request":
        """A copy with more records."""
        return Request({**self.configs, **(configs or {})}, (*self.arrays, *arrays))

    def check(self, content: RecordDict) -> None:
        """Check that a message asks for nothing else.

        Raises ValueError if a record or a key is not declared, or a value out of range; the text
        names it.
        """
        for name, record in content.items():
            stem = _stem(name)
            if isinstance(record, ConfigRecord) and stem in self.configs:
                _check_block(self.configs[stem], record, f"message {name}")
            elif not (isinstance(record, ArrayRecord) and stem in self.arrays):
                raise ValueError(f"a record {name!r:.60} is not on the list")


@dataclass(frozen=True)
class Reply:
    """Records that a reply may contain; a reply with any other record is rejected.

    Parameters
    ----------
    metrics : type[Block] (default: NoMetrics)
        Keys, types and ranges of the record ``metrics``.
    arrays : Mapping[str, ArrayCheck]
        Check of each array record, by name.
    configs : Mapping[str, type[Block]]
        Keys, types and ranges of each config record, by name. ``parcel.*`` matches ``parcel.1``
        and so on.
    optional : Collection[str]
        Names of array and config records that may be missing.
    """

    metrics: type[Block] = NoMetrics
    arrays: Mapping[str, ArrayCheck] = field(default_factory=dict)
    configs: Mapping[str, type[Block]] = field(default_factory=dict)
    optional: Collection[str] = ()

    def plus(
        self,
        *,
        metrics: type[Block] | None = None,
        arrays: Mapping[str, ArrayCheck] | None = None,
    ) -> "Reply":
        """A copy with other metrics, or with more arrays."""
        return replace(
            self, metrics=metrics or self.metrics, arrays={**self.arrays, **(arrays or {})}
        )

    def check(self, content: RecordDict, model: Arrays) -> None:
        """Check the content of a reply to ``model``, which is empty if none was sent to the node.

        Raises ValueError if a record is missing, unknown or malformed; the text names it.
        """
        names = {_stem(name) for name in content if name != METRICS}
        known = {*self.arrays, *self.configs}
        if odd := names - known:
            raise ValueError(f"it brings a record {min(odd)!r} that this phase has no use for")
        if missing := known - names - set(self.optional) - {k for k in known if k.endswith(".*")}:
            raise ValueError(f"it brings no record {min(missing)!r}")
        metrics = content.get(METRICS, MetricRecord())
        if not isinstance(metrics, MetricRecord):
            raise ValueError(f"{METRICS} is a {type(metrics).__name__}")
        check_numbers(metrics)
        if sum(map(len, content.values())) > MAX_VALUES:
            raise ValueError(f"its records have more than {MAX_VALUES:,} keys")
        _check_block(self.metrics, metrics, METRICS)
        for name, record in content.items():
            if name != METRICS:
                self._check_record(name, record, model)

    def _check_record(self, name: str, record: object, model: Arrays) -> None:
        stem = _stem(name)
        if isinstance(record, ArrayRecord) and stem in self.arrays:
            self.arrays[stem](record, model)
        elif isinstance(record, ConfigRecord) and stem in self.configs:
            _check_block(self.configs[stem], record, name)
        else:
            raise ValueError(f"{name} is a {type(record).__name__}")


def check_numbers(metrics: MetricRecord) -> None:
    """Check that metrics are few, and finite numbers of a usual size.

    Raises ValueError if not; the text names the first.
    """
    count = 0
    for key, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        count += len(numbers)
        if count > MAX_VALUES:
            raise ValueError(f"{METRICS} has more than {MAX_VALUES:,} numbers")
        if odd := [n for n in numbers if not abs(n) <= MAX_NUMBER]:  # NaN too
            raise ValueError(f"{METRICS}: {key} = {odd[0]!r} is no number up to {MAX_NUMBER:.0e}")


def like_the_model(record: ArrayRecord, model: Arrays) -> None:
    """Check that a record contains the model's arrays, all finite."""
    model_arrays(record, model)


def part_of_the_model(record: ArrayRecord, model: Arrays) -> None:
    """Check that every array has name and shape of one of the model's, fits it, and is finite."""
    for name, array in finite_arrays(record).items():
        like = model.get(name)
        if like is None or array.shape != like.shape or not np.can_cast(array.dtype, like.dtype):
            raise ValueError(f"its {name} is not of this run's model")


def _check_block(block: type[Block], record: Mapping[str, object], name: str) -> None:
    try:
        block.checked(record, name)
    except SettingsError as error:
        raise ValueError(str(error)) from None


def _stem(name: str) -> str:
    """Name of a record, with ``.*`` in place of a rank at its end."""
    stem, dot, rank = name.rpartition(".")
    return f"{stem}.*" if dot and rank.isdecimal() else name


TRAIN_REQUEST = Request({CONFIG: TrainRequest}, (ARRAYS,))
"""Request of Flower's plain ``train``."""
EVALUATE_REQUEST = Request({CONFIG: EvaluateRequest}, (ARRAYS,))
"""Request of Flower's plain ``evaluate``."""
TRAIN = Reply(metrics=TrainMetrics, arrays={"arrays": like_the_model})
"""Reply to Flower's plain ``train``."""
EVALUATE = Reply(metrics=EvaluateMetrics)
"""Reply to an evaluation, with metrics alone."""
EVALUATE_AND_COUNT = replace(EVALUATE, configs={COUNTS: CountsReport}, optional=(COUNTS,))
"""Reply to Flower's plain ``evaluate``."""
