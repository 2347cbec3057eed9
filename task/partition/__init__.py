"""Splits of samples among nodes."""

from task.partition.indices import SCHEMES, partition_indices
from task.partition.request import PartitionError

__all__ = ["SCHEMES", "PartitionError", "partition_indices"]
