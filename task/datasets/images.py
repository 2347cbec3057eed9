"""Convert image files and arrays to the channels and size of a dataset."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flwr_distill.task.datasets.types import DatasetError, DataSpec, Pixels, RawSamples
from flwr_distill.task.image_files import Encoded, open_image
from flwr_distill.task.large_arrays import stacked

_MODES = {1: "L", 3: "RGB"}
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue, which are Pillow's too."""


def read_image(file: Path | Encoded, spec: DataSpec) -> Pixels:
    """Read an image file as pixels (C, H, W) in the spec's channels and size.

    They are uint8, or float32 from 0 to 1 where the file has more than 8 bits per pixel. Raises
    `task.image_files.UnusableFileError` if it is no image or cannot be decoded.
    """
    return fit_array(open_image(file).pixels, spec)


def fit_image(image: Image.Image, spec: DataSpec) -> NDArray[np.uint8]:
    """Convert to the spec's channels and resize (bilinear) to its size: (C, H, W)."""
    channels, height, width = _convertible(spec)
    fitted = image.convert(_MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def fit_array(image: Pixels, spec: DataSpec) -> Pixels:
    """Convert a (C', H', W') image, with C' 1 or 3, to the spec's (C, H, W)."""
    if image.shape == spec.shape:
        return image
    if image.dtype != np.uint8:
        return _fit_floats(image, spec)
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return fit_image(Image.fromarray(np.ascontiguousarray(pixels)), spec)


def fit_samples(raw: RawSamples, spec: DataSpec) -> RawSamples:
    """Convert pixels to the spec's channels and size; other samples are returned unchanged."""
    images = raw.images
    if spec.kind != "image" or images.ndim != 4 or images.shape[1] not in _MODES or not len(images):
        return raw
    return RawSamples(stacked(fit_array(image, spec) for image in images), raw.labels)


def _convertible(spec: DataSpec) -> tuple[int, int, int]:
    """Shape of a spec; DatasetError if images cannot be converted to its channels."""
    if spec.shape[0] not in _MODES:
        raise DatasetError(
            f"has {spec.shape[0]} channels; images can only be converted to 1 or 3",
            where=repr(spec.name),
        )
    return spec.shape


def _fit_floats(image: Pixels, spec: DataSpec) -> NDArray[np.float32]:
    """Do for float32 what `fit_image` does; Pillow has no colours of more than 8 bits."""
    channels, height, width = _convertible(spec)
    bands = [Image.fromarray(np.ascontiguousarray(band)) for band in image]
    resized = [band.resize((width, height), Image.Resampling.BILINEAR) for band in bands]
    fitted = np.stack([np.asarray(band) for band in resized])
    if channels < len(fitted):
        fitted = np.tensordot(_GREY, fitted, 1)[None]
    return np.repeat(fitted.clip(0, 1), channels // len(fitted), axis=0)
