"""Reads text files, whatever system wrote them.

Windows begins them with a byte order mark, or writes UTF-16. macOS splits letters from their
accents (Unicode's form NFD); others do not (NFC).
"""

import codecs
import csv
import io
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from flwr_distill.task.errors import DatasetError

_UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


class EncodingError(ValueError):
    """A text file has another encoding; says where in it, with the remedy, but not which file."""


@contextmanager
def open_text(path: Path, errors: Literal["strict", "replace"] = "strict") -> Iterator[TextIO]:
    """Open a text file in UTF-8, or in UTF-16 with a byte order mark; line ends are kept.

    With ``errors="replace"``, what is in another encoding is read as question marks.

    Raises
    ------
    EncodingError
        In the block, if the file has another encoding.
    OSError
        If it cannot be read.
    """
    with path.open("rb") as content:
        is_utf_16 = content.peek(2).startswith(_UTF_16)
        encoding = "utf-16" if is_utf_16 else "utf-8-sig"
        try:
            with io.TextIOWrapper(content, encoding, errors, newline="") as text:
                yield text
        except UnicodeDecodeError as error:
            place = "its UTF-16 is damaged" if is_utf_16 else f"{_bad_line(path)} is not UTF-8"
            raise EncodingError(f"{place}; save it as UTF-8") from error


def read_text(path: Path) -> str:
    """Read a text file as `open_text` does."""
    with open_text(path) as text:
        return text.read()


@contextmanager
def open_rows(path: Path, what: str, **dialect: Any) -> Iterator[Any]:
    """Open a file of values as a `csv.reader`, whose ``line_num`` is that of the last row.

    Raises
    ------
    DatasetError
        In the block, if the file is no readable `what`; says which line, or why.
    """
    line = 0
    try:
        with open_text(path) as text:
            rows = csv.reader(text, **dialect)
            try:
                yield rows
            finally:
                line = rows.line_num
    except DatasetError:
        raise
    except csv.Error as error:
        raise DatasetError(f"{path}, line {line}: {error}; repair the line") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not a readable {what} ({error})") from error


def composed(text: str) -> str:
    """Text in Unicode's form NFC, where a letter and its accent are one character."""
    return unicodedata.normalize("NFC", text)


def _bad_line(path: Path) -> str:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}"
    return "it"
