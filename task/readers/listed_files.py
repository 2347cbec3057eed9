"""Folders of images with a list of their classes: a CSV file with the columns file and label."""

import csv
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from flwr_distill.task.errors import DatasetError
from flwr_distill.task.image_files import Finding, printable, visible
from flwr_distill.task.readers import DataReader, StoredImage
from flwr_distill.task.text_files import composed, open_rows, open_text

COLUMNS = {"file", "label"}


class ListedFiles(DataReader):
    """Reads the images that a list names."""

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
                    f"{listing}, line {line}: {printable(str(name))} is in line {known} too; keep "
                    "the right one"
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
        raise DatasetError(f"{folder}: need one list with the columns file and label, got {names}")
    (listing,) = lists
    with open_rows(listing, "list") as rows:
        header = _names(next(rows))
        if any(header.count(name) > 1 for name in COLUMNS):
            raise DatasetError(f"{listing}: need one column file and one column label")
        for row in rows:
            if not any(value.strip() for value in row):
                continue  # a blank line
            where = f"{listing}, line {rows.line_num}"
            if len(row) != len(header):
                raise DatasetError(f"{where}: has {len(row)} values, need {len(header)}")
            name, label = (row[header.index(column)].strip() for column in ("file", "label"))
            if not label:
                raise DatasetError(f"{where}: has no label; write one, or remove the line")
            yield rows.line_num, _inside(name, where), label


def _inside(name: str, where: str) -> PurePosixPath:
    """Path of a file below the folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DatasetError(f"{where}: need a file within the folder, got {printable(name)!r}")
    return path


def _in_any_form(folder: Path, name: PurePosixPath) -> Path:
    """File of this name, in which another system may have split accents from letters or not."""
    forms = (name, composed(str(name)), unicodedata.normalize("NFD", str(name)))
    return next((file for form in forms if (file := folder / form).exists()), folder / name)


READER = ListedFiles()
