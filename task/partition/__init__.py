"""Splits of samples among nodes."""

from flwr_distill.task.partition.indices import SCHEMES, check_partition, partition_indices
from flwr_distill.task.partition.request import PartitionError

__all__ = ["SCHEMES", "PartitionError", "check_partition", "partition_indices"]
