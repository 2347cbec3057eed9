"""Read ``.npz`` files of images and labels."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.datasets.types import (
    DatasetError,
    DataSpec,
    Pixels,
    RawSamples,
    check_raw_samples,
)
from flwr_distill.task.image_files import SCALE_FLOATS, float_problem, printable


def read_npz(path: Path, spec: DataSpec) -> RawSamples:
    """Read images, (n, H, W) or (n, H, W, C), and integer labels that fit ``spec``."""
    return check_raw_samples(read_npz_samples(path), spec, str(path))


def read_npz_samples(path: Path) -> RawSamples:
    """Read images of any shape and their labels."""
    return RawSamples(read_npz_images(path), read_npz_labels(path))


def read_npz_labels(path: Path) -> NDArray[np.int64]:
    """Read the array ``labels`` of an ``.npz`` file."""
    labels = read_array(path, "labels")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DatasetError(f"labels are {labels.dtype}, need integers", where=path)
    return labels.astype(np.int64)


def read_npz_images(path: Path) -> Pixels:
    """Read the array ``images`` of an ``.npz`` file as pixels (n, C, H, W)."""
    return as_pixels(read_array(path, "images"), path)


def as_pixels(stored: NDArray[np.generic], path: Path) -> Pixels:
    """Convert stored images, (n, H, W) or (n, H, W, C), to pixels (n, C, H, W).

    uint8 and floats from 0 to 1 are kept, uint16 is divided by 65,535, and booleans are black and
    white. Other types and ranges are refused, because their black and white are unknown. So is
    uint16 up to 255, which is probably uint8 in a wider type.
    """
    if stored.ndim not in (3, 4) or 0 in stored.shape[1:]:
        raise DatasetError(
            f"images have the shape {stored.shape}, need (n, H, W) or (n, H, W, C)", where=path
        )
    values: Pixels
    match stored.dtype.kind, stored.dtype.itemsize:
        case "u", 1:
            values = stored.astype(np.uint8, copy=False)
        case "b", _:
            values = stored.astype(np.uint8) * np.uint8(255)
        case "u", 2 if stored.max(initial=0) > 255:
            values = np.divide(stored, np.float32(65535), dtype=np.float32)
        case "f", _:
            with np.errstate(over="ignore"):  # infinite ones are refused
                values = stored.astype(np.float32, copy=False)
            if values.size and (problem := float_problem(values.min(), values.max())):
                raise DatasetError(problem, where=path, remedy=SCALE_FLOATS)
        case _:
            raise DatasetError(f"images are {stored.dtype}", where=path, remedy=_remedy(stored))
    with_channels = values[..., None] if values.ndim == 3 else values
    return np.ascontiguousarray(with_channels.transpose(0, 3, 1, 2))


def _remedy(stored: NDArray[np.generic]) -> str:
    """How to save integers so that their range is known, without losing any."""
    if stored.dtype.kind not in "iu" or not stored.size:
        return "need uint8, uint16, or floats from 0 to 1"
    lowest, highest = int(stored.min()), int(stored.max())
    for name, largest in (("uint8", 255), ("uint16", 65535)):
        if lowest >= 0 and highest <= largest:
            return f"if 0 is black and {largest} white, save images.astype(numpy.{name})"
    return (
        f"they run from {lowest} to {highest}: scale them to floats from 0 to 1, by the same two "
        "values on all nodes"
    )


def read_array(path: Path, key: str) -> NDArray[np.generic]:
    """Read one array of an ``.npz`` file; nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist().count(f"{key}.npy") > 1:
                raise ValueError(f"it has several arrays {key!r}")
        with np.load(path, allow_pickle=False) as arrays:
            if key not in arrays:
                names = printable(str(sorted(arrays)))
                problem = f"has the arrays {names}, need 'images' and 'labels'"
                raise DatasetError(problem, where=path)
            array: object = arrays[key]
            if not isinstance(array, np.ndarray):  # another file, under this name
                raise ValueError(f"{key!r} in it is no array")
            return array
    except DatasetError:
        raise
    except Exception as error:  # damaged files make zipfile and NumPy raise errors of many kinds
        why = printable(str(error) or type(error).__name__)
        raise DatasetError(
            f"not a readable .npz file ({why})",
            where=path,
            remedy="write it with numpy.savez_compressed(path, images=..., labels=...)",
        ) from error
