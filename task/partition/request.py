"""Arguments and errors of partition schemes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class PartitionError(ValueError):
    """A partition is not possible; names the setting and its allowed values."""


@dataclass(frozen=True)
class Request:
    """Checked arguments of :func:`task.partition.partition_indices`."""

    labels: Indices
    num_partitions: int
    classes_per_node: int
    alpha: float
    clusters: str
    seed: int
    index_file: str | Path | None
