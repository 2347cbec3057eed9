"""Data sets of Hugging Face on disk: Arrow files of ``save_to_disk``, or a folder of Parquet files.

They are read batch by batch with pyarrow. No code of the data set runs, and nothing is cached.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_distill.task.errors import DatasetError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.image_files import Encoded, Finding, printable, visible
from flwr_distill.task.readers import DataReader, MissingPackageError, StoredImage

ENDINGS = (".arrow", ".parquet")
SPLITS, STATE = "dataset_dict.json", "state.json"
BATCH = 4
"""Rows of a Parquet file that are in memory at once."""
BUFFER = 1 << 20
"""Bytes of a Parquet file that are read at once; else whole groups of rows are."""
ARROW_FILE = b"ARROW1"
"""Start of an Arrow file that is no stream."""
SAVE_AGAIN = "save the data set again"
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")


class ArrowFolder(DataReader):
    """Reads an image column and a label column."""

    title = "a folder of Arrow or Parquet files"

    def recognises(self, path: Path) -> bool:
        """Whether a folder has such files, or is what ``save_to_disk`` writes of several splits."""
        if not path.is_dir():
            return False
        return (path / SPLITS).is_file() or any(file.suffix in ENDINGS for file in visible(path))

    def classes(self, path: Path) -> list[str]:
        """Names of the label column's ``ClassLabel``, else all labels."""
        return _classes(path)

    def images(self, path: Path) -> Iterator[StoredImage | Finding]:
        """Give the rows in the order of the files' names."""
        for file in _shards(path):
            columns = _columns(file)
            row = -1
            for images, labels in _batches(file, [columns.image, columns.label]):
                for image, label in zip(images, labels, strict=True):
                    row += 1
                    place = printable(f"{file.name}/row {row}")
                    name, content = columns.name_of(label.as_py(), file), _content(image.as_py())
                    if name is None:
                        yield Finding("unreadable", place, "has no label; give it one, or drop it")
                    elif content is None:
                        reason = "has no image in it; save it with the image's bytes (save_to_disk)"
                        yield Finding("unreadable", place, reason)
                    else:
                        yield StoredImage(place, name, Encoded(file / f"row {row}", content))


@dataclass(frozen=True)
class _Columns:
    """Names of the columns, and of the classes if the label column says them."""

    image: str
    label: str
    names: tuple[str, ...]

    def name_of(self, label: object, file: Path) -> str | None:
        """Name or number of a label; None if there is none."""
        if isinstance(label, str):
            return label.strip() or None
        if label is None or label == -1:  # what unlabelled test sets have
            return None
        if not isinstance(label, int) or label < 0 or (self.names and label >= len(self.names)):
            raise DatasetError(
                "is no label", where=f"{file}, column {self.label!r}", value=printable(str(label))
            )
        return self.names[label] if self.names else str(int(label))


@read_once(lambda path: [path], maxsize=4)
def _classes(path: Path) -> list[str]:
    names: set[str] = set()
    for file in _shards(path):
        columns = _columns(file)
        if columns.names:
            names.update(columns.names)
            continue
        for (labels,) in _batches(file, [columns.label]):
            distinct = labels.unique().to_pylist()
            labelled = (columns.name_of(label, file) for label in distinct)
            names.update(name for name in labelled if name is not None)
    return sorted(names)


def _shards(folder: Path) -> list[Path]:
    """Files of the folder's one split, in order."""
    if (folder / SPLITS).is_file():
        splits = [str(name) for name in _json(folder / SPLITS).get("splits", [])]
        if len(splits) != 1 or "/" in splits[0] or splits[0].startswith("."):
            problem = f"has the splits {printable(', '.join(splits))}"
            raise DatasetError(problem, where=folder, remedy="give the folder of one of them")
        folder = folder / splits[0]
    if (folder / STATE).is_file():
        listed = _json(folder / STATE).get("_data_files", [])
        names = [str(entry.get("filename")) for entry in listed if isinstance(entry, dict)]
        files = [folder / name for name in names if Path(name).name == name]
    else:
        files = [file for file in visible(folder) if file.suffix in ENDINGS]
    shards = [SHARD.fullmatch(file.stem) for file in files]
    if len({match[1] for match in shards if match}) > 1:
        raise DatasetError(
            "has several splits", where=folder, remedy="put the files of one into a folder"
        )
    if not files:
        raise DatasetError(f"has no files {' or '.join(ENDINGS)}", where=folder)
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError("not readable", where=file, remedy=SAVE_AGAIN) from error
    return content if isinstance(content, dict) else {}


def _columns(file: Path) -> _Columns:
    """Find the image and the label column: by name, else the only ones of Hugging Face's types."""
    schema = _schema(file)
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"]
        kinds = {name: feature.get("_type") for name, feature in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        features, kinds = {}, {}
    image = _column(file, schema.names, "image", [n for n in kinds if kinds[n] == "Image"])
    label = _column(file, schema.names, "label", [n for n in kinds if kinds[n] == "ClassLabel"])
    names = features.get(label, {}).get("names") if kinds.get(label) == "ClassLabel" else None
    return _Columns(image, label, tuple(map(str, names or ())))


def _column(file: Path, names: list[str], name: str, of_type: list[str]) -> str:
    if name in names:
        return name
    if len(of_type) == 1 and of_type[0] in names:
        return of_type[0]
    others = printable(", ".join(names))
    raise DatasetError(f"need a column {name!r}, got {others}", where=file, remedy="rename it")


def _content(value: object) -> bytes | None:
    """Bytes of an image file: the value itself, or beside a path, which is ignored."""
    content = value.get("bytes") if isinstance(value, dict) else value
    return content if isinstance(content, bytes) and content else None


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A Parquet file, or a reader of an Arrow file's batches; errors name the file."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        missing = MissingPackageError("pyarrow", "parquet")
        raise DatasetError(missing.problem, where=file, remedy=missing.remedy) from error
    try:
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file, buffer_size=BUFFER) as table:
                yield table
        else:
            with pyarrow.memory_map(str(file)) as content:
                is_file = content.read(len(ARROW_FILE)) == ARROW_FILE
                content.seek(0)
                yield ipc.open_file(content) if is_file else ipc.open_stream(content)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        reason = printable(str(error).partition("\n")[0])
        raise DatasetError(f"not readable ({reason})", where=file, remedy=SAVE_AGAIN) from error


def _batches(file: Path, names: list[str]) -> Iterator[list[Any]]:
    """Columns of one batch after another."""
    with opened(file) as source:
        if hasattr(source, "iter_batches"):
            batches = source.iter_batches(BATCH, columns=names)
        elif hasattr(source, "get_batch"):
            batches = map(source.get_batch, range(source.num_record_batches))
        else:
            batches = source
        for batch in batches:
            yield [batch.column(name) for name in names]


def _schema(file: Path) -> Any:
    with opened(file) as source:
        return source.schema_arrow if hasattr(source, "schema_arrow") else source.schema


READERS = (ArrowFolder(),)
