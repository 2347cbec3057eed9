"""Datasets: their description, stored pixels and model inputs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_distill.task.errors import DatasetError as DatasetError  # passed on
from flwr_distill.task.image_files import SCALE_FLOATS, float_problem
from flwr_distill.task.labels import LabelMap, positions
from flwr_distill.task.large_arrays import empty, joined
from flwr_distill.task.settings import Change

PRIVATE = "private"
"""Name of the data of nodes that bring their own."""
AT_ONCE = 64
"""Samples that are normalised in one go."""
Pixels = NDArray[np.uint8 | np.float32 | np.float64]
"""Pixels of images, uint8 or float32 from 0 to 1; of texts and tables, their values."""


_CONTENT: dict[str, tuple[tuple[type[np.number[Any]], ...], str]] = {
    "image": ((np.uint8, np.float32), "pixels, uint8 or float32 from 0 to 1"),
    "text": ((np.float32,), "token ids as float32"),
    "table": ((np.float32, np.float64), "a table's values, float32 or float64"),
}
"""Types of the values of each kind of data, and what they are called in an error."""


@dataclass(frozen=True)
class DataSpec:
    """Shape and classes that a model must fit.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Channels, height, width of one image.
    num_classes : int
        Labels run from 0 to ``num_classes - 1``.
    mean, std : tuple[float, ...]
        Mean and standard deviation of each channel, for pixels in [0, 1].
    kind : str (default: "image")
        ``image``; ``text``, with token ids along the width; or ``table``, with one channel per
        feature.
    vocabulary : int (default: 0)
        Number of token ids, for text.
    safe_changes : tuple[str, ...] (default: shift, scale, rotate and cutout)
        Changes that leave an image in its class, for ``train.augment="auto"``; see
        :func:`task.augmentation.augmented`. Texts and tables are not changed.
    labels : LabelMap (default: LabelMap())
        Names of the classes by label, and of a table's columns by channel; for each or for none.
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Literal["image", "text", "table"] = "image"
    vocabulary: int = 0
    safe_changes: tuple[Change, ...] = ("shift", "scale", "rotate", "cutout")
    labels: LabelMap = field(default_factory=LabelMap, repr=False)

    def __post_init__(self) -> None:
        named = (self.labels.classes, self.num_classes), (self.labels.columns, self.shape[0])
        for names, expected in named:
            if names and len(names) != expected:
                problem = f"has {len(names)} names, need {expected}"
                raise DatasetError(problem, where=repr(self.name))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; its position where the data have no names."""
        return self.labels.classes or positions(self.num_classes)

    @property
    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised values of a black and of a full pixel, float32 (C, 1, 1) each."""
        mean, std = (torch.tensor(x).reshape(-1, 1, 1) for x in (self.mean, self.std))
        return -mean / std, (1 - mean) / std


@dataclass(frozen=True)
class Samples:
    """Images ready for a model, with their labels.

    Parameters
    ----------
    inputs : Tensor
        float32 (n, C, H, W), normalised with the spec's mean and std.
    labels : Tensor
        int64 (n,), or soft labels, float32 (n, num_classes).
    """

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Samples":
        """The same samples on ``device``."""
        return Samples(self.inputs.to(device), self.labels.to(device))

    def minibatch(
        self, indices: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels at ``indices``, on ``device``.

        They go to a GPU through pinned memory, so that it computes while they are copied.
        """
        pairs = (self.inputs[indices], self.labels[indices])
        if device.type == "cuda" and not self.inputs.is_cuda:
            pairs = (pairs[0].pin_memory(), pairs[1].pin_memory())
        return pairs[0].to(device, non_blocking=True), pairs[1].to(device, non_blocking=True)

    def with_more(self, more: "Samples") -> "Samples":
        """These samples and then others, with labels of the same kind."""
        return Samples(joined([self.inputs, more.inputs]), torch.cat([self.labels, more.labels]))

    def subset(self, indices: Sequence[int] | NDArray[np.int64] | torch.Tensor) -> "Samples":
        """The samples at ``indices``, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return Samples(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True)
class RawSamples:
    """Images as stored, with their labels.

    Parameters
    ----------
    images : ndarray
        Pixels (n, C, H, W): uint8, or float32 from 0 to 1 where they have more than 8 bits. Token
        ids of texts are float32; a table's values are float64, which its large ones need.
    labels : ndarray
        int64 (n,).
    """

    images: Pixels
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> "RawSamples":
        """The samples at ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return RawSamples(self.images[chosen], self.labels[chosen])

    def to_samples(self, spec: DataSpec, chosen: torch.Tensor | None = None) -> Samples:
        """Normalise with ``spec``'s mean and std into model inputs: all, or those at `chosen`."""
        places = torch.arange(len(self)) if chosen is None else chosen
        shape = len(places), *self.images.shape[1:]
        inputs = torch.from_numpy(empty(shape, np.float32))
        for part, into in zip(*(torch.split(x, AT_ONCE) for x in (places, inputs)), strict=True):
            into.copy_(normalise(self.images[part.numpy()], spec))
        return Samples(inputs, torch.tensor(self.labels)[places])


@dataclass(frozen=True)
class Dataset:
    """A dataset with disjoint training and test parts."""

    spec: DataSpec
    train: RawSamples
    test: RawSamples


def fingerprint_of(spec: DataSpec, *parts: RawSamples) -> bytes:
    """Hash of the samples in their order, and of their spec, 16 bytes.

    Unlike `task.file_state.state_of` it is the same for a copy. It reveals what can be guessed.
    """
    digest = hashlib.blake2b(repr(spec).encode(), digest_size=16)
    if spec.labels != LabelMap():  # which may be thousands of names
        digest.update(spec.labels.digest.encode())
    for array in (array for part in parts for array in (part.images, part.labels)):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def not_found(name: str, places: str, hint: str = "", where: str = "dataset") -> DatasetError:
    """Error for a named data set whose files are at none of these places."""
    remedy = f"set data-root (or $FLWR_DISTILL_DATA_ROOT) to its folder{hint}"
    return DatasetError(f"was not found; tried {places}", where=where, value=name, remedy=remedy)


def normalise(images: Pixels, spec: DataSpec) -> torch.Tensor:
    """Convert stored pixels (n, C, H, W) to model inputs, float32 ``(pixel / 255 - mean) / std``.

    Only uint8 is divided by 255. A table's float64 become float32 at the end, because values such
    as times in milliseconds differ in digits that float32 does not have.
    """
    dtype = torch.float64 if images.dtype == np.float64 else torch.float32
    mean, std = (torch.tensor(x, dtype=dtype).reshape(-1, 1, 1) for x in (spec.mean, spec.std))
    largest = 255 if images.dtype == np.uint8 else 1
    return torch.tensor(images, dtype=dtype).div_(largest).sub_(mean).div_(std).float()


def check_raw_samples(raw: RawSamples, spec: DataSpec, where: str) -> RawSamples:
    """Return ``raw``, or raise DatasetError (naming `where` it is from) unless it fits ``spec``."""
    images, labels = raw.images, raw.labels
    types, content = _CONTENT[spec.kind]
    if images.dtype not in types or images.ndim != 4 or images.shape[1:] != spec.shape:
        raise DatasetError(
            f"samples are {images.dtype} {images.shape}, but {spec.name!r} needs {content}, of "
            f"shape (n, C, H, W) = (n, {', '.join(map(str, spec.shape))})",
            where=where,
        )
    if labels.dtype != np.int64 or labels.shape != (len(images),):
        raise DatasetError(
            f"labels are {labels.dtype} {labels.shape}, need one int64 label for each of the "
            f"{len(images)} samples",
            where=where,
        )
    if not len(labels):
        raise DatasetError("has no images; need at least one", where=where)
    if spec.kind == "image":
        if images.dtype != np.uint8 and (problem := float_problem(images.min(), images.max())):
            raise DatasetError(problem, where=where, remedy=SCALE_FLOATS)
    elif problem := _value_problem(images, spec):
        raise DatasetError(problem, where=where)
    if labels.min() < 0 or labels.max() >= spec.num_classes:
        raise DatasetError(
            f"labels run from {labels.min()} to {labels.max()}, but {spec.name!r} has labels 0 to "
            f"{spec.num_classes - 1}",
            where=where,
        )
    return raw


def _value_problem(values: Pixels, spec: DataSpec) -> str:
    """Problem of a text's token ids or a table's values; or nothing."""
    if spec.kind == "table":
        return "" if np.isfinite(values).all() else "has values that are not finite"
    lowest, highest = values.min(), values.max()
    if lowest >= 0 and highest < spec.vocabulary and (values == np.floor(values)).all():
        return ""
    return (
        f"has token ids from {lowest:g} to {highest:g}, need whole numbers from 0 to "
        f"{spec.vocabulary - 1}"
    )
