"""First messages to a node: who it is, what is missing, and what it stored in an earlier run."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from flwr_distill.links.digits import MAX_EXACT, NUM_DIGITS, digits_of, number_of
from flwr_distill.links.records import Introduction, NodeId, NodeName, NotAnId, Printable
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record, finite_arrays
from flwr_distill.protocol.messages import (
    CONFIG,
    DATASET,
    INTRODUCTION,
    NAME,
    NUM_EXAMPLES,
    PARTITION_ID,
    SECTOR,
)
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import MAX_NUMBER, Count, Reply, Request
from flwr_distill.storage.store import SECRET_BYTES, NodeStore
from flwr_distill.task.columns import MAX_VALUE, MIN_VARIANCE, Moments, Scale, scale_of_sums
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import MAX_NAME_LENGTH, MAX_NAMES, LabelError, LabelMap, names_problem
from flwr_distill.task.settings import Block

DESCRIBE = "query.describe"
"""Ask a node who it is: name, partition, sector, samples, data set of its own, how to send to it,
and what is missing for the run."""

DESCRIBE_COLUMNS = "query.describe_columns"
"""Ask a node for the mean and variance of columns of its own table, before the first meeting."""

COLUMNS = "columns"
"""Array record of the reply: ``mean`` and ``variance`` of each column that the run states no scale
of, float64, in the run's order; in secure sums ``sums``, see `record_of_sums`."""
SUMS = "sums"

CONTINUE = "query.continue_run"
"""Have a node take over its files of the run that this one resumes."""

MAX_CODECS = 20
Codec = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,20}$")]
MAX_REASONS = 8
MAX_REASON = 300
Name = Annotated[Printable, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


def _distinct(names: list[str]) -> list[str]:
    if problem := names_problem(names):
        raise ValueError(problem)
    return names


Names = Annotated[list[Name], Field(max_length=MAX_NAMES), AfterValidator(_distinct)]
"""Of classes or columns, as a label map can have them."""
Label = Annotated[int, Field(ge=0, lt=MAX_NAMES)]
Value = Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)]
Deviation = Annotated[float, Field(gt=0, le=MAX_VALUE)]
Secret = Annotated[bytes, Field(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
Reason = Annotated[Printable, Field(min_length=1, max_length=MAX_REASON)]


class Requirement(Block):
    """What a run needs on nodes that its run config does not say."""

    method: str = ""
    """Name of the run's method; empty if that needs nothing."""
    package: str = ""
    """The package (``name==version``) that it comes from; empty for ours."""
    settings: str = "{}"
    """JSON object of the method's settings, with those of ``strategy-args``."""
    frozen: str = ""
    """Fingerprint of the part of the server's model that is not trained; empty if all of it is."""
    resumes: Annotated[str, Field(pattern=r"^[0-9]{0,20}$")] = ""
    """Flower's id of the run that this one resumes, for which nodes show the secret that they
    showed in it; empty for none."""
    classes: Names = Field(default_factory=list)
    """The run's label map; empty where its data have no names, or nodes say them first."""
    columns: Names = Field(default_factory=list)
    """Its columns; empty likewise."""
    column_means: list[Value] = Field(default_factory=list, max_length=MAX_NAMES)
    """What nodes standardise the columns of their own tables by; empty where the run states all."""
    column_deviations: list[Deviation] = Field(default_factory=list, max_length=MAX_NAMES)
    """Deviations to these means."""

    @property
    def scale(self) -> Scale | None:
        """What nodes standardise columns by; None if the message says none.

        Raises ValueError if it says more means than deviations, or fewer.
        """
        pairs = list(zip(self.column_means, self.column_deviations, strict=True))
        return Scale(*zip(*pairs, strict=True)) if pairs else None

    def check_labels(self, own: LabelMap) -> None:
        """Check that the names in a copy of the run's data set are the run's.

        Raises LabelError if they are not; it shows both.
        """
        run = LabelMap(tuple(self.classes), tuple(self.columns))
        if run == LabelMap():  # the server knows no names
            return
        if difference := own.difference(run):
            raise LabelError(f"{difference} (give all the same names, or leave this data set out)")


class DescribeMetrics(Block):
    """A node's number of training samples, and its partition and sector if it has any.

    A node that cannot take part has 0 samples. ``together`` is 1 for a virtual node of a
    simulation that trains together with others.
    """

    num_examples: Count
    partition_id: Count | None = None
    sector: Count | None = None
    together: Annotated[int, Field(ge=0, le=1)] = 0


class DescribeConfig(Block):
    """What else a node says of itself."""

    name: NodeName | None = None
    """Given by its owner."""
    dataset: Annotated[NotAnId, Field(min_length=1, max_length=200)] | None = None
    """Its own data set, used in place of the run's."""
    class_names: Names = Field(default_factory=list)
    """Names of all classes by its class folders, in order; if these are numbers, ``0`` and so on.
    Empty if the run has named the classes, or the node's data do not."""
    classes: Annotated[list[Label], Field(max_length=MAX_NAMES)] | None = None
    """Labels among its training samples; None with differential privacy."""
    missing: list[Reason] = Field(default_factory=list, max_length=MAX_REASONS)
    """Why it cannot take part, each with a remedy."""
    secret: Secret | None = None
    """Of its state directory and this run, by which it gets its place back if the run is resumed.
    The server keeps a hash."""
    resumed_secret: Secret | None = None
    """The same of the run that this one resumes."""
    fingerprint: Secret | None = None
    """Of the data that it has read, by `NodeStore.keyed`; None where its policy lets only declared
    replies leave."""
    codecs: Annotated[list[Codec], Field(max_length=MAX_CODECS)] = Field(default_factory=list)
    """Codecs of models that it reads and writes; what connects it has them, not the app."""
    loopback: bool = False
    """Whether it calls the SuperLink on its own machine; what connects it says so, not the app."""
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{0,40}$")] = ""
    """Of our package, on the node; empty if that is older than this field, or not ours."""
    device: Annotated[str, Field(pattern=r"^[a-z]{1,10}(:[0-9]{1,4})?$")] | None = None
    """On which it computes, as in ``cuda:1``."""


class Notice(Block):
    """What the server says of a node, for the log of its owner."""

    texts: Annotated[list[Reason], Field(max_length=MAX_REASONS)]


class ColumnsMetrics(Block):
    """Number of samples that means and variances are of."""

    num_examples: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class ColumnsRequest(Block):
    """How many columns a secure sum is of: those that the run states no scale of."""

    columns: Annotated[int, Field(ge=1, le=MAX_NAMES)]


class Continuation(Block):
    """The run to resume: its Flower id, the node's id in it, and the last round that counts."""

    run_id: NodeId
    node_id: NodeId
    round: Annotated[int, Field(ge=0)]


class ContinueMetrics(Block):
    """Number of files taken over."""

    files: Annotated[int, Field(ge=0)]


def requirement_of(
    method: Method | None,
    settings: Block | None = None,
    frozen: str = "",
    labels: LabelMap | None = None,
) -> Requirement | None:
    """What a run needs on nodes; None if its code is ours and it needs nothing else.

    Given its method, None for strategies of no method, the method's settings, the fingerprint of
    the frozen part of the model, and the label map if the server knows names.
    """
    names = labels or LabelMap()
    of_all = Requirement(frozen=frozen, classes=list(names.classes), columns=list(names.columns))
    if method is None or not (method.needs or (method.package and (method.phases or method.terms))):
        return None if of_all == Requirement() else of_all
    of_method = {
        "method": method.name,
        "package": method.package,
        "settings": json.dumps(settings.model_dump(by_alias=True) if settings else {}),
    }
    return of_all.model_copy(update=of_method)


def record_of_columns(moments: Moments) -> ArrayRecord:
    """Record of a node's means and variances."""
    arrays = {"mean": np.array(moments.mean), "variance": np.array(moments.variance)}
    return as_record(arrays)


def moments_in(record: ArrayRecord, rows: int) -> Moments:
    """Means and variances over so many samples, from a record that was checked."""
    arrays = as_arrays(record)
    mean, variance = (tuple(arrays[name].tolist()) for name in ("mean", "variance"))
    return Moments(rows, mean, variance)


def record_of_sums(moments: Moments, names: Sequence[str]) -> ArrayRecord:
    """Record of what a node adds to secure sums: digits of its rows, and of its columns' sums.

    Of each column the sum comes first, then the sum of squares.

    Raises SettingsError if a column's do not fit; names it.
    """
    numbers = [Fraction(moments.rows)]
    for name, variance, sums in zip(names, moments.variance, moments.sums, strict=True):
        if 0 < variance < MIN_VARIANCE or max(map(abs, sums)) >= MAX_EXACT:
            stated = f"private.columns={name}:MEAN+-DEVIATION"
            raise SettingsError(
                "too large, or varies too little, for secure sums",
                where=f"column {name!r}",
                remedy=f"change its unit, or state its scale: {stated}",
            )
        numbers += sums
    return as_record({SUMS: np.stack([digits_of(number) for number in numbers])})


def scale_in(sums: NDArray[np.float64]) -> Scale:
    """Scale from the sums of nodes' digits.

    Raises ValueError if no rows have such sums.
    """
    rows, *numbers = map(number_of, sums)
    return scale_of_sums(rows, list(zip(numbers[::2], numbers[1::2], strict=True)))


def _summed_columns(content: RecordDict, model: Arrays) -> Mapping[str, Arrays]:
    """Arrays like those of `record_of_sums`; they take no memory."""
    record = content.config_records.get(CONFIG, ConfigRecord())
    num_columns = ColumnsRequest.checked(record, "message").columns
    return {COLUMNS: {SUMS: np.broadcast_to(0.0, (1 + 2 * num_columns, NUM_DIGITS))}}


def _check_columns(record: ArrayRecord, model: Arrays) -> None:
    if record.keys() != {"mean", "variance"}:
        raise ValueError("its arrays are not mean and variance")
    arrays = finite_arrays(record)
    mean, variance = (np.asarray(arrays[name]) for name in ("mean", "variance"))
    for array in (mean, variance):
        if array.dtype != np.float64 or array.shape != (mean.size,):
            raise ValueError(f"its columns are {array.dtype} {array.shape}, need float64 (n,)")
    if np.abs(mean).max(initial=0) > MAX_VALUE:
        raise ValueError(f"a mean is beyond {MAX_VALUE:g}")
    if variance.min(initial=0) < 0 or variance.max(initial=0) > MAX_VALUE**2:
        raise ValueError(f"a variance is below 0, or beyond {MAX_VALUE**2:g}")


def identity(node_config: Mapping[str, Any]) -> tuple[MetricRecord, dict[str, Any]]:
    """Metrics and config with which a node says who it is, before it says what it has."""
    metrics = MetricRecord({NUM_EXAMPLES: 0})
    for key in (PARTITION_ID, SECTOR):
        if key in node_config:
            metrics[key] = int(node_config[key])
    return metrics, {key: str(node_config[key]) for key in (NAME, DATASET) if key in node_config}


@cache
def own_version() -> str:
    """Version of our package that is installed here; empty if none is."""
    try:
        return version("flwr-distill")
    except PackageNotFoundError:
        return ""


def place_secrets(store: NodeStore, resumes: str) -> dict[str, bytes]:
    """Config with which a node shows that its place in the run, or the resumed one, is its own."""
    secrets = {"secret": store.place_secret()}
    if resumes:
        secrets["resumed-secret"] = store.place_secret(resumes)
    return secrets


def one_line(text: object) -> str:
    """An error's text as a reason: one printable line of at most ``MAX_REASON`` characters."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 4]} ..."


PHASES = (
    Phase(
        DESCRIBE,
        "nodes say who they are",
        (
            Reply(
                metrics=DescribeMetrics,
                configs={INTRODUCTION: Introduction, CONFIG: DescribeConfig},
                optional={INTRODUCTION, CONFIG},
            ),
        ),
        "flwr_distill.client.app:describe",
        request=Request({CONFIG: Requirement}),
        leaves="who it is, how many samples it has, their keyed fingerprint, its labels, "
        "and why it cannot take part",
    ),
    Phase(
        DESCRIBE_COLUMNS,
        "nodes describe their columns",
        (Reply(metrics=ColumnsMetrics, arrays={COLUMNS: _check_columns}),),
        "flwr_distill.client.app:describe_columns",
        request=Request({CONFIG: ColumnsRequest}),
        leaves="mean and variance of each column of its table that the run states no scale of, and "
        "the number of samples",
        summed=_summed_columns,
    ),
    Phase(
        CONTINUE,
        "nodes take over what they kept",
        (Reply(metrics=ContinueMetrics),),
        "flwr_distill.client.app:continue_run",
        request=Request({CONFIG: Continuation}),
    ),
)
