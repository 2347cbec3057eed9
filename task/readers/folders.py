"""Folders of images: with one folder per class, or with a list of files and their classes."""

import csv
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from flwr_distill.task.errors import DatasetError
from flwr_distill.task.image_files import Finding, printable, visible
from flwr_distill.task.labels import in_order, same_number
from flwr_distill.task.readers import DataReader, StoredImage
from flwr_distill.task.text_files import composed, open_rows, open_text

COLUMNS = {"file", "label"}


class ListedFiles(DataReader):
    """Reads the images that a list names: a CSV file with the columns file and label."""

    title = "a folder with a list of files and labels"

    def recognises(self, path: Path) -> bool:
        """Whether a folder has a CSV file with these columns."""
        return path.is_dir() and bool(_lists(path))

    def classes(self, path: Path) -> list[str]:
        """Labels of the list."""
        return sorted({label for _, _, label in _rows(path)})

    def images(self, path: Path) -> Iterator[StoredImage | Finding]:
        """Give the files in the list's order, and files that it does not name."""
        (listing,) = _lists(path)
        first: dict[str, int] = {}
        for line, name, label in _rows(path):
            if (known := first.setdefault(composed(str(name)), line)) != line:
                raise DatasetError(
                    f"{printable(str(name))} is in line {known} too",
                    where=f"{listing}, line {line}",
                    remedy="keep the right one",
                )
            yield StoredImage(printable(str(name)), label, _in_any_form(path, name))
        reason = f"is not in {listing.name}; add it, or remove it"
        for file in visible(path):
            if file.is_file() and file != listing and composed(file.name) not in first:
                yield Finding("stray", printable(file.name), reason)

    def number(self, path: Path) -> int:
        """Number of rows."""
        return sum(1 for _ in _rows(path))


def _lists(folder: Path) -> list[Path]:
    """CSV files of a folder that have the columns of a list."""
    files = (file for file in visible(folder) if file.suffix.lower() == ".csv" and file.is_file())
    return [file for file in files if set(_header(file)) >= COLUMNS]


def _header(file: Path) -> list[str]:
    try:
        with open_text(file, errors="replace") as content:
            return _names(next(csv.reader(content), []))
    except (OSError, ValueError, csv.Error):
        return []


def _names(row: list[str]) -> list[str]:
    return [name.strip().lower() for name in row]


def _rows(folder: Path) -> Iterator[tuple[int, PurePosixPath, str]]:
    """Line, file and label of each row."""
    lists = _lists(folder)
    if len(lists) != 1:
        names = ", ".join(printable(file.name) for file in lists) or "none"
        raise DatasetError(
            f"need one list with the columns file and label, got {names}", where=folder
        )
    (listing,) = lists
    with open_rows(listing, "list") as rows:
        header = _names(next(rows)[1])
        if any(header.count(name) > 1 for name in COLUMNS):
            raise DatasetError("need one column file and one column label", where=listing)
        for line, row in rows:
            where = f"{listing}, line {line}"
            if len(row) != len(header):
                raise DatasetError(f"has {len(row)} values, need {len(header)}", where=where)
            name, label = (row[header.index(column)].strip() for column in ("file", "label"))
            if not label:
                raise DatasetError("has no label", where=where, remedy="add one, or drop the line")
            yield line, _inside(name, where), label


def _inside(name: str, where: str) -> PurePosixPath:
    """Path of a file below the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DatasetError("need a file within the folder", where=where, value=printable(name))
    return path


def _in_any_form(folder: Path, name: PurePosixPath) -> Path:
    """File of this name, in which another system may have split accents from letters or not."""
    forms = (name, composed(str(name)), unicodedata.normalize("NFD", str(name)))
    return next((file for form in forms if (file := folder / form).exists()), folder / name)


class ClassFolders(DataReader):
    """Reads images from folders that are named after their classes."""

    title = "a folder of class folders"
    is_fallback = True

    def recognises(self, path: Path) -> bool:
        """Whether it is a folder."""
        return path.is_dir()

    def classes(self, path: Path) -> list[str]:
        """Names of the folders."""
        return [folder.name for folder in _class_folders(path)]

    def images(self, path: Path) -> Iterator[StoredImage | Finding]:
        """Give files beside the folders, then those of each folder, in sorted order."""
        reason = "lies beside the class folders; move it into one, or remove it"
        for file in visible(path):
            if not file.is_dir():
                yield Finding("stray", printable(file.name), reason)
        for folder in _class_folders(path):
            for file in visible(folder):
                place = printable(f"{folder.name}/{file.name}")
                yield StoredImage(place, folder.name, file)

    def number(self, path: Path) -> int:
        """Number of files in the folders."""
        return sum(len(visible(folder)) for folder in _class_folders(path))


def _class_folders(root: Path) -> list[Path]:
    names = in_order(path.name for path in visible(root) if path.is_dir())
    if not names:
        raise DatasetError(
            "has no class folders", where=root, remedy="sort the images into one per class"
        )
    if problem := same_number(names):
        raise DatasetError(problem, where=f"{root}, class folders")
    return [root / name for name in names]


READERS = (ListedFiles(), ClassFolders())
