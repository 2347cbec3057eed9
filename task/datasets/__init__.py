"""Datasets by name, a node's own data, and auxiliary images."""

from flwr_distill.task.datasets.auxiliary import (
    auxiliary_files,
    auxiliary_images,
    auxiliary_labels,
)
from flwr_distill.task.datasets.own_tables import load_inputs, load_own_table, moments_of
from flwr_distill.task.datasets.private import labels_of, load_private_data
from flwr_distill.task.datasets.registry import dataset_files, load_dataset
from flwr_distill.task.datasets.types import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    Samples,
    fingerprint_of,
)

__all__ = [
    "DataSpec",
    "Dataset",
    "DatasetError",
    "RawSamples",
    "Samples",
    "auxiliary_files",
    "auxiliary_images",
    "auxiliary_labels",
    "dataset_files",
    "fingerprint_of",
    "labels_of",
    "load_dataset",
    "load_inputs",
    "load_own_table",
    "load_private_data",
    "moments_of",
]
