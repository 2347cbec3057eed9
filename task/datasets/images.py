"""Convert image files and arrays to the channels and size of a dataset."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from task.datasets.types import DatasetError, DataSpec, RawSamples
from task.image_files import open_image

_MODES = {1: "L", 3: "RGB"}


def read_image(path: Path, spec: DataSpec) -> NDArray[np.uint8]:
    """Read an image file as uint8 (C, H, W) in the spec's channels and size.

    Raises `task.image_files.UnusableFileError` if it is no image or cannot be decoded.
    """
    return fit_image(open_image(path), spec)


def fit_image(image: Image.Image, spec: DataSpec) -> NDArray[np.uint8]:
    """Convert to the spec's channels and resize (bilinear) to its size: uint8 (C, H, W)."""
    channels, height, width = spec.shape
    if channels not in _MODES:
        raise DatasetError(
            f"{spec.name!r} has {channels} channels; images can only be converted to 1 or 3"
        )
    fitted = image.convert(_MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def fit_array(image: NDArray[np.uint8], spec: DataSpec) -> NDArray[np.uint8]:
    """Convert a uint8 (C', H', W') image, with C' 1 or 3, to the spec's (C, H, W)."""
    if image.shape == spec.shape:
        return image
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return fit_image(Image.fromarray(np.ascontiguousarray(pixels)), spec)


def fit_samples(raw: RawSamples, spec: DataSpec) -> RawSamples:
    """Convert pixels to the spec's channels and size; other samples are returned unchanged."""
    images = raw.images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in _MODES:
        return raw
    fitted = [fit_array(image, spec) for image in images.astype(np.uint8, copy=False)]
    return RawSamples(np.stack(fitted), raw.labels) if fitted else raw
