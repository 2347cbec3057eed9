"""WebDataset: tar files in which ``KEY.cls`` is the class of ``KEY.png``. Nothing is extracted."""

import io
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from flwr_distill.task.errors import DatasetError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.image_files import MAX_BYTES, Encoded, Finding, printable, visible
from flwr_distill.task.labels import MAX_NAME_LENGTH
from flwr_distill.task.readers import DataReader, StoredImage

LABEL = "cls"
DESCRIPTIONS = {"json", "txt", "__key__"}
"""Endings of what stands beside an image and is not read."""
MAX_LABEL = 4 * MAX_NAME_LENGTH
"""Bytes of a label in UTF-8, with blanks around it."""


class WebDataset(DataReader):
    """Reads images from a tar file, or a folder of tar files, member by member."""

    title = "a WebDataset"

    def recognises(self, path: Path) -> bool:
        """Whether it is a tar file, or a folder that has some and no folders."""
        return bool(_shards(path))

    def classes(self, path: Path) -> list[str]:
        """Labels of all samples; of a tar file on disk only these are read."""
        return _classes(path)

    def images(self, path: Path) -> Iterator[StoredImage | Finding]:
        """Give the image of each sample, in the order of the files."""
        for shard in _shards(path):
            yield from _samples(shard, with_images=True)


@read_once(lambda path: [path], maxsize=4)
def _classes(path: Path) -> list[str]:
    samples = (s for shard in _shards(path) for s in _samples(shard, with_images=False))
    return sorted({sample.label for sample in samples if isinstance(sample, StoredImage)})


def _shards(path: Path) -> list[Path]:
    if path.suffix.lower() == ".tar" and path.is_file():
        return [path]
    if not path.is_dir():
        return []
    below = visible(path)
    if any(file.is_dir() for file in below):
        return []
    return [file for file in below if file.suffix.lower() == ".tar"]


def _samples(shard: Path, *, with_images: bool) -> Iterator[StoredImage | Finding]:
    """Samples of a tar file; a sample's members follow each other."""
    try:
        with (
            _BoundedReads(shard) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            members = (member for member in _members(archive) if not _is_hidden(member))
            for key, group in groupby(members, lambda member: _split(member.name)[0]):
                yield from _sample(shard, key, archive, group, with_images=with_images)
    except DatasetError:
        raise
    except Exception as error:  # damaged files make tarfile raise errors of many kinds
        raise DatasetError(
            f"not a readable tar file ({type(error).__name__})",
            where=shard,
            remedy="copy it again, uncompressed (.tar)",
        ) from error


class _BoundedReads(io.FileIO):
    """A file of which no more than an image is read at once, whatever a header says."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_BYTES:
            raise ValueError(f"asks for {size} bytes at once")
        return super().read(size)


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members one by one; `archive` does not collect them."""
    last = -1
    while (member := archive.next()) is not None:
        if member.offset <= last:
            raise ValueError("its members run backwards")
        last = member.offset
        archive.members = []  # type: ignore[attr-defined]
        yield member
    file = archive.fileobj
    assert file is not None
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a damaged header looks like it
        raise ValueError("its end is missing")


def _is_hidden(member: tarfile.TarInfo) -> bool:
    return member.name.rpartition("/")[2].startswith(".")


def _split(name: str) -> tuple[str, str]:
    """Key and ending of a member, whose name ends at the first dot after its folders."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def _sample(
    shard: Path,
    key: str,
    archive: tarfile.TarFile,
    members: Iterator[tarfile.TarInfo],
    *,
    with_images: bool,
) -> Iterator[StoredImage | Finding]:
    label, image, number = None, None, 0
    place = printable(f"{shard.name}/{key}")
    for member in members:
        ending = _split(member.name)[1]
        if member.isdir() or (member.isfile() and ending in DESCRIPTIONS):
            continue
        if reason := _unusable(member, ending):
            yield Finding("stray", printable(f"{shard.name}/{member.name}"), reason)
        elif ending == LABEL:
            try:
                label = _content(archive, member).decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise DatasetError(
                    "its label is not text",
                    where=f"{shard}, {printable(member.name)}",
                    remedy="save it as UTF-8",
                ) from error
        else:
            number += 1
            content = _content(archive, member) if with_images and number == 1 else b""
            image = image or Encoded(shard / Path(member.name).name, content)
    if image and number == 1 and label:
        yield StoredImage(place, label, image)
    elif number or label is not None:
        reason = f"has {number} images and {'a' if label else 'no'} label (.{LABEL})"
        yield Finding("unreadable", place, f"{reason}; put one of each next to each other")


def _unusable(member: tarfile.TarInfo, ending: str) -> str:
    """Why a member is not read, or nothing."""
    if not member.isfile() or member.issparse():
        return "is a link or a device; store the file itself"
    if member.name.startswith("/") or ".." in Path(member.name).parts or not ending:
        return "has a name that is no KEY.ENDING within the archive; rename it"
    limit = MAX_LABEL if ending == LABEL else MAX_BYTES
    if member.size > limit:
        return f"has {member.size:,} bytes, need at most {limit:,}"
    return ""


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # of a file
    with file:
        return file.read()


READERS = (WebDataset(),)
