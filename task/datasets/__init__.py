"""Datasets by name, a node's own data, and auxiliary images."""

from task.datasets.auxiliary import auxiliary_images
from task.datasets.private import labels_of, load_private_data
from task.datasets.registry import load_dataset
from task.datasets.types import Dataset, DatasetError, DataSpec, RawSamples, Samples

__all__ = [
    "DataSpec",
    "Dataset",
    "DatasetError",
    "RawSamples",
    "Samples",
    "auxiliary_images",
    "labels_of",
    "load_dataset",
    "load_private_data",
]
