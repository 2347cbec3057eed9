"""Read ``.npz`` files of images and labels."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples


def read_npz(path: Path, spec: DataSpec) -> RawSamples:
    """Read images (uint8, (n, H, W) or (n, H, W, C)) and integer labels that fit ``spec``."""
    return check_raw_samples(read_npz_samples(path), spec, str(path))


def read_npz_samples(path: Path) -> RawSamples:
    """Read images of any shape and their labels."""
    images = read_npz_images(path)
    labels = _read_array(path, "labels")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DatasetError(f"{path}: labels are {labels.dtype}, need integers")
    return RawSamples(images, labels.astype(np.int64))


def read_npz_images(path: Path) -> NDArray[np.uint8]:
    """Read the array ``images`` of an ``.npz`` file as uint8 (n, C, H, W)."""
    images = _read_array(path, "images")
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DatasetError(
            f"{path}: images are {images.dtype} {images.shape}, need uint8 of shape "
            "(n, H, W) or (n, H, W, C); save pixels 0 to 255 with images.astype(numpy.uint8)"
        )
    with_channels = images[..., None] if images.ndim == 3 else images
    return np.ascontiguousarray(with_channels.transpose(0, 3, 1, 2))


def _read_array(path: Path, key: str) -> NDArray[np.generic]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if key not in arrays:
                raise DatasetError(
                    f"{path}: has the arrays {sorted(arrays)}, need 'images' and 'labels'"
                )
            array: NDArray[np.generic] = arrays[key]
            return array
    except DatasetError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DatasetError(
            f"{path}: not a readable .npz file ({error}); write it with "
            "numpy.savez_compressed(path, images=..., labels=...)"
        ) from error
