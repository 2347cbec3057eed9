"""Splits of samples among nodes."""

from task.partition.indices import SCHEMES, check_partition, partition_indices
from task.partition.request import PartitionError

__all__ = ["SCHEMES", "PartitionError", "check_partition", "partition_indices"]
