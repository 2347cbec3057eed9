"""What a data set is made of: its description, stored pixels and model inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray


class DatasetError(ValueError):
    """Data that cannot be found, read or used; the message says what would do."""


@dataclass(frozen=True)
class DataSpec:
    """What a model must fit.

    Attributes
    ----------
    name : str
        Name of the data set.
    shape : tuple of int
        Channels, height, width of one image.
    num_classes : int
        Labels run from 0 to ``num_classes - 1``.
    mean, std : tuple of float
        Mean and standard deviation of each channel, of pixels in [0, 1].
    kind : str
        ``image``; ``text``, with token ids along the width; or ``table``, with a channel for each
        feature. Default: ``"image"``.
    vocabulary : int
        Number of token ids, for text. Default: 0.
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Literal["image", "text", "table"] = "image"
    vocabulary: int = 0


@dataclass(frozen=True)
class Samples:
    """Images ready for a model, with their labels.

    Attributes
    ----------
    inputs : torch.Tensor
        float32 (n, C, H, W), normalised with the spec's mean and std.
    labels : torch.Tensor
        int64 (n,), or soft labels, float32 (n, num_classes).
    """

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Samples":
        """Return the same samples on ``device``."""
        return Samples(self.inputs.to(device), self.labels.to(device))

    def subset(self, indices: Sequence[int] | NDArray[np.int64] | torch.Tensor) -> "Samples":
        """Return the samples at ``indices``, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return Samples(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True)
class RawSamples:
    """Images as they are stored, with their labels.

    Attributes
    ----------
    images : ndarray
        uint8 (n, C, H, W); float32 for texts and tables.
    labels : ndarray
        int64 (n,).
    """

    images: NDArray[np.uint8 | np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> "RawSamples":
        """Return the samples at ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return RawSamples(self.images[chosen], self.labels[chosen])

    def to_samples(self, spec: DataSpec) -> Samples:
        """Return the samples as model inputs, normalised with ``spec``'s mean and std."""
        return Samples(normalise(self.images, spec), torch.tensor(self.labels))


@dataclass(frozen=True)
class Dataset:
    """A data set with its training and test parts.

    Attributes
    ----------
    spec : DataSpec
        What a model must fit.
    train, test : RawSamples
        The two parts; they share no sample.
    """

    spec: DataSpec
    train: RawSamples
    test: RawSamples


def normalise(images: NDArray[np.uint8 | np.float32], spec: DataSpec) -> torch.Tensor:
    """Turn stored pixels into model inputs.

    Parameters
    ----------
    images : ndarray
        (n, C, H, W) with the spec's channels: pixels as uint8, other values as float32.
    spec : DataSpec
        Gives mean and std of each channel.

    Returns
    -------
    torch.Tensor
        float32 (n, C, H, W): ``(pixel / 255 - mean) / std``, without the 255 for other values.
    """
    mean = torch.tensor(spec.mean).reshape(-1, 1, 1)
    std = torch.tensor(spec.std).reshape(-1, 1, 1)
    largest = 255 if images.dtype == np.uint8 else 1
    return torch.tensor(images, dtype=torch.float32).div_(largest).sub_(mean).div_(std)


def check_raw_samples(raw: RawSamples, spec: DataSpec, where: str) -> RawSamples:
    """Return ``raw`` if it fits ``spec``.

    Parameters
    ----------
    raw : RawSamples
        Samples from outside: a file or another package.
    spec : DataSpec
        What they must fit.
    where : str
        File or function they come from, for the message.

    Raises
    ------
    DatasetError
        If there are none, or types, shapes or labels do not fit.
    """
    images, labels = raw.images, raw.labels
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != spec.shape:
        raise DatasetError(
            f"{where}: images are {images.dtype} {images.shape}, but {spec.name!r} needs uint8 "
            f"pixels of shape (n, C, H, W) = (n, {', '.join(map(str, spec.shape))})"
        )
    if labels.dtype != np.int64 or labels.shape != (len(images),):
        raise DatasetError(
            f"{where}: labels are {labels.dtype} {labels.shape}, need one int64 label for each "
            f"of the {len(images)} images"
        )
    if not len(labels):
        raise DatasetError(f"{where}: holds no images, need at least one")
    if labels.min() < 0 or labels.max() >= spec.num_classes:
        raise DatasetError(
            f"{where}: labels run from {labels.min()} to {labels.max()}, but {spec.name!r} has "
            f"labels 0 to {spec.num_classes - 1}"
        )
    return raw
