"""Folders with one folder of images per class."""

from collections.abc import Iterator
from pathlib import Path

from flwr_distill.task.image_files import (
    Finding,
    beside_class_folders,
    class_folders,
    printable,
    visible,
)
from flwr_distill.task.readers import DataReader, StoredImage


class ClassFolders(DataReader):
    """Reads images from folders that are named after their classes."""

    title = "a folder of class folders"

    def recognises(self, path: Path) -> bool:
        """Whether it is a folder."""
        return path.is_dir()

    def classes(self, path: Path) -> list[str]:
        """Names of the folders."""
        return [folder.name for folder in class_folders(path)]

    def images(self, path: Path) -> Iterator[StoredImage | Finding]:
        """Give the files of each folder, in sorted order."""
        yield from beside_class_folders(path)
        for folder in class_folders(path):
            for file in visible(folder):
                place = printable(f"{folder.name}/{file.name}")
                yield StoredImage(place, folder.name, file)

    def number(self, path: Path) -> int:
        """Number of files in the folders."""
        return sum(len(visible(folder)) for folder in class_folders(path))


CLASS_FOLDERS = ClassFolders()
"""No ``READER``: it is for folders that no reader recognises."""
