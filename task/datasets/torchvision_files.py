"""Datasets in the folder layout of torchvision, which also downloads them."""

import errno
import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples


@dataclass(frozen=True)
class TorchvisionFiles:
    """A dataset read by a class (`dataset`) of ``torchvision.datasets``.

    Below the root are all of its `files` (or folders). Its attribute `labels` has the labels. With
    `split_by_name` the class takes ``split="train"`` instead of ``train=True``.
    """

    dataset: str
    files: tuple[str, ...]
    labels: str = "targets"
    split_by_name: bool = False

    def exists(self, root: Path) -> bool:
        """Whether ``root`` has all files."""
        return all((root / name).exists() for name in self.files)

    def paths(self, root: Path) -> list[Path]:
        """Files and folders below ``root`` that are read, there or not."""
        return [root / name for name in self.files]

    def download(self, root: Path) -> None:
        """Let torchvision download the training and test parts to ``root``.

        Each file or folder is moved there when it is whole: processes that download into one folder
        at a time do not disturb each other, and none reads half a file.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".download-", dir=root) as own:
                for train in (True, False):
                    self._construct(Path(own), train, download=True)
                for name in self.files:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    _move(Path(own) / name, root / name)
        except (RuntimeError, OSError) as error:
            raise DatasetError(
                f"{self.dataset} could not be downloaded ({error})",
                where=root,
                remedy="check the connection, or put the files there and set download=false",
            ) from error

    def read(self, root: Path, train: bool, spec: DataSpec) -> RawSamples:
        """Read one part; raise DatasetError if its files are damaged or do not fit ``spec``."""
        try:
            images, labels = self._read_arrays(root, train)
        except (RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
            raise DatasetError(
                f"torchvision's {self.dataset} files cannot be read ({error})",
                where=root,
                remedy="remove them and run again with download=true",
            ) from error
        raw = RawSamples(np.ascontiguousarray(images), labels)
        return check_raw_samples(raw, spec, f"{root / self.files[0]}")

    def _read_arrays(self, root: Path, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        stored = self._construct(root, train, download=False)
        images = np.asarray(stored.data)
        if images.ndim == 3:  # USPS: (n, H, W)
            images = images[:, None]
        elif images.shape[-1] == 3:  # CIFAR: (n, H, W, C); SVHN is (n, C, H, W) already
            images = images.transpose(0, 3, 1, 2)
        return images, np.asarray(getattr(stored, self.labels), dtype=np.int64)

    def _construct(self, root: Path, train: bool, *, download: bool) -> Any:
        import torchvision

        part: dict[str, bool | str] = {"train": train}
        if self.split_by_name:
            part = {"split": "train" if train else "test"}
        return getattr(torchvision.datasets, self.dataset)(root, download=download, **part)


def _move(source: Path, target: Path) -> None:
    """Move a file or folder, unless another process has put a folder there."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


class IdxFiles(TorchvisionFiles):
    """MNIST and similar: four idx files, read here so that they can stay gzipped.

    Format: two zero bytes, type (8 = uint8), number of dimensions, each dimension as a big-endian
    int32, then the values (http://yann.lecun.com/exdb/mnist).
    """

    def __init__(self, dataset: str) -> None:
        parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        super().__init__(dataset, tuple(f"{dataset}/raw/{part}-ubyte" for part in parts))

    def exists(self, root: Path) -> bool:
        """Whether ``root`` has all four files, unpacked or gzipped."""
        return all((root / name).exists() or (root / f"{name}.gz").exists() for name in self.files)

    def paths(self, root: Path) -> list[Path]:
        """The four files, unpacked and gzipped."""
        return [root / f"{name}{end}" for name in self.files for end in ("", ".gz")]

    def _read_arrays(self, root: Path, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        images, labels = self.files[:2] if train else self.files[2:]
        return _read_idx(root / images)[:, None], _read_idx(root / labels).astype(np.int64)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    packed = path.with_name(f"{path.name}.gz")
    content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError(f"{path.name} is not an idx file of uint8 values")
    ndim = content[3]
    shape = np.frombuffer(content, ">i4", count=ndim, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)
