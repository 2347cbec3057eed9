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

from flwr_distill.task.errors import DatasetError, ReportedError

_UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


class EncodingError(ReportedError, ValueError):
    """A text file has another encoding; says where in it, but not which file."""


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
            problem = "its UTF-16 is damaged" if is_utf_16 else f"{_bad_line(path)} is not UTF-8"
            raise EncodingError(problem, remedy="save it as UTF-8") from error


def read_text(path: Path) -> str:
    """Read a text file as `open_text` does."""
    with open_text(path) as text:
        return text.read()


@contextmanager
def open_rows(path: Path, what: str, **dialect: Any) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Open a file of values: header and rows with their line numbers, without blank rows.

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
                yield _not_blank(rows)
            finally:
                line = rows.line_num
    except DatasetError:
        raise
    except csv.Error as error:
        raise DatasetError(
            str(error), where=f"{path}, line {line}", remedy="repair the line"
        ) from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"not a readable {what} ({error})", where=path) from error


def _not_blank(rows: Any) -> Iterator[tuple[int, list[str]]]:
    for number, row in enumerate(rows):
        if number == 0 or any(value.strip() for value in row):
            yield rows.line_num, row


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
