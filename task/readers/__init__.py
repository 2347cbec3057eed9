"""Readers of images: of formats that Pillow does not read, and of ways to store images by class.

Ours are the ``READERS`` of each module in this package; an installed package has entry points in
the group ``flwr_distill.readers``. Nothing here imports NumPy or torch: a node's supervisor
inspects its data too.
"""

import importlib
import logging
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from flwr_distill.task.errors import DatasetError, ReportedError
from flwr_distill.task.plugin import PluginError, import_object, plugged_in_readers
from flwr_distill.task.text_files import composed

if TYPE_CHECKING:
    from flwr_distill.task.image_files import Encoded, Finding, Picture, Stored

logger = logging.getLogger("task")


class UnreadableImageError(ReportedError, ValueError):
    """An image file cannot be read or must not be; its caller adds which."""


class MissingPackageError(DatasetError):
    """A reader's package is not installed here."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"needs the package {package}", remedy=f"pip install 'flwr-distill[{extra}]'"
        )


class ImageReader(ABC):
    """Reads image files of one format. Files are open, and start at their first byte.

    Methods raise `UnreadableImageError`, or whatever a damaged file makes a decoder raise.
    """

    @abstractmethod
    def recognises(self, file: BinaryIO) -> bool:
        """Whether a file is of this format, by a few bytes of it."""

    @abstractmethod
    def inspect(self, file: BinaryIO) -> "Stored":
        """Describe the image by the file's header."""

    @abstractmethod
    def read(self, file: BinaryIO) -> "Picture":
        """Decode the image as a viewer shows it."""


@dataclass(frozen=True)
class StoredImage:
    """An image of a node's data, and its class."""

    place: str
    """Where it is in the data, for findings."""
    label: str
    """Name of its class, or its number in decimal digits."""
    image: "Path | Encoded"
    """For `task.image_files.open_image`."""


class DataReader(ABC):
    """Reads images by class from a file or folder; raises `DatasetError` if it cannot at all."""

    is_fallback = False
    """Whether it is for data that no other reader recognises."""
    title: str
    """Its kind of data, for errors: "a folder of Parquet files"."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether a file or folder, which may be missing, is of this kind."""

    @abstractmethod
    def classes(self, path: Path) -> list[str]:
        """Names of all classes, or their numbers in decimal digits; some may have no image.

        Names may be in any of Unicode's forms: `data_reader` gives them in one.
        """

    @abstractmethod
    def images(self, path: Path) -> "Iterator[StoredImage | Finding]":
        """Give one image at a time, always in the same order, and what cannot be one."""

    def number(self, path: Path) -> int:
        """Number of what `images` gives, for a progress bar; 0 if it is unknown."""
        return 0


class _Composed(DataReader):
    """A reader whose names of classes are in Unicode's form NFC, as those of the run are."""

    def __init__(self, reader: DataReader) -> None:
        self.title = reader.title
        self._reader = reader

    def recognises(self, path: Path) -> bool:
        return self._reader.recognises(path)

    def classes(self, path: Path) -> list[str]:
        return list(dict.fromkeys(map(composed, self._reader.classes(path))))

    def images(self, path: Path) -> "Iterator[StoredImage | Finding]":
        for sample in self._reader.images(path):
            if isinstance(sample, StoredImage):
                yield replace(sample, label=composed(sample.label))
            else:
                yield sample

    def number(self, path: Path) -> int:
        return self._reader.number(path)


def image_reader(file: BinaryIO) -> ImageReader | None:
    """Reader of an open file's format; None if there is none, so that Pillow reads it."""
    for reader in (reader for reader in _readers() if isinstance(reader, ImageReader)):
        recognised = reader.recognises(file)
        file.seek(0)
        if recognised:
            return reader
    return None


def data_reader(path: Path) -> DataReader | None:
    """Reader of images at a path; None if there is none. DatasetError if there are several.

    A folder that no other reader knows is one of class folders. Names of classes that differ only
    in Unicode's form are one name.
    """
    readers = [r for r in _readers() if isinstance(r, DataReader) and r.recognises(path)]
    others = [reader for reader in readers if not reader.is_fallback] or readers
    if len(others) > 1:
        titles = " and ".join(reader.title for reader in others)
        raise DatasetError(f"is {titles} at once", where=path, remedy="keep one of them there")
    return _Composed(others[0]) if others else None


def _readers() -> list[object]:
    return [*_built_in(), *_plugged_in(tuple(sys.path))]


@cache
def _built_in() -> list[object]:
    names = (f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    modules = map(importlib.import_module, names)
    return [reader for module in modules for reader in getattr(module, "READERS", ())]


@cache
def _plugged_in(path: tuple[str, ...]) -> list[object]:
    """Readers of packages that are installed on Python's path; broken ones are logged."""
    readers = []
    for name in plugged_in_readers():
        try:
            readers.append(import_object(name))
        except PluginError as error:
            logger.warning("the reader %s is not used: %s", name, error)
    return readers
