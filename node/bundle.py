"""App bundles: archives from submitters, bounded before anything is unpacked.

Flower's own folders of unpacked bundles are named by eight digits of the hash, and writable to
apps.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import flwr_distill

MAX_BYTES = 10 << 20
"""Of a bundle; a SuperLink of Flower's takes no larger one."""
MAX_UNPACKED = 64 << 20
"""Bytes of all files together."""
MAX_RATIO = 100
"""Bytes of all files, over those of the bundle; code shrinks to a quarter."""
MAX_FILES = 5_000
MAX_DEPTH = 12
MAX_NAME = 200
"""Characters of a path in a bundle."""
MAX_SETTINGS = 1 << 18
"""Bytes of ``pyproject.toml``."""
KEPT = 8
"""Bundles that stay unpacked: nodes switch between a few runs."""

_SETTINGS = "pyproject.toml"
_MANIFEST = ".info"
_ENTRY = b"PK\x01\x02"
"""Begins each entry of an archive's list of files."""


class BundleError(ValueError):
    """A bundle is malformed or too large. Workers import this: no base of another room."""


def folder_of_bundles(flower_home: Path) -> Path:
    """Folder of unpacked bundles in a node's ``FLWR_HOME``."""
    return flower_home / "bundles"


def prefer(bundle: Path) -> None:
    """Have modules of our package that are not imported yet come from a bundle that has it.

    Python would take those that are installed here: the package itself is imported already.
    """
    package = bundle / flwr_distill.__name__
    if (package / "__init__.py").is_file():
        flwr_distill.__path__[:0] = [str(package), str(bundle)]


def check_hash(content: bytes, name: str) -> None:
    """Check that a bundle's name is its SHA-256."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != name:
        raise BundleError(f"its SHA-256 is {digest}, and it is named {name}")


def settings_of(content: bytes) -> dict[str, Any]:
    """Read a bundle's ``pyproject.toml``."""
    for _, data in _files(content, only=_SETTINGS):
        try:
            return tomllib.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{_SETTINGS} is malformed ({type(error).__name__})") from None
    raise BundleError(f"it has no {_SETTINGS}")


def unpack(content: bytes, folder: Path) -> Path:
    """Unpack a bundle into its own folder below `folder`, unless it is there; return that folder.

    A process that can write there can change the code of each bundle. A bad bundle writes nothing.
    """
    target = folder / hashlib.sha256(content).hexdigest()
    if target.is_dir():
        return target
    files = list(_files(content))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        for name, data in files:
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as stream:
                stream.write(data)
        with suppress(OSError):  # another process was faster
            os.rename(partial, target)
        if not target.is_dir():
            raise OSError(f"{target} cannot be made")
    except (FileExistsError, NotADirectoryError):
        raise BundleError("one of its files is a folder, too") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_others(folder, target)
    return target


def _files(content: bytes, only: str | None = None) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Names and contents of a bundle's files, or of one, after all bounds have been checked."""
    if len(content) > MAX_BYTES:
        raise BundleError(f"it has {len(content):,} bytes, over {MAX_BYTES:,}")
    if content.count(_ENTRY) > MAX_FILES:  # before they are listed, which takes memory
        raise BundleError(f"it has over {MAX_FILES:,} files")
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            entries = archive.infolist()
            _check_size(sum(entry.file_size for entry in entries), len(content))
            checked = {_checked(entry): entry for entry in entries if not entry.is_dir()}
            if len(checked) < sum(not entry.is_dir() for entry in entries):
                raise BundleError("two of its files have one name")
            for name, entry in checked.items():
                if name.parts[0] != _MANIFEST and only in (None, str(name)):
                    # Without a size, all that an entry unpacks to is in memory before it is cut.
                    with archive.open(entry) as file:
                        yield name, file.read(entry.file_size)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
        raise BundleError(f"it is not an archive as Flower makes them: {error}") from None


def _check_size(size: int, packed: int) -> None:
    if size > min(MAX_UNPACKED, MAX_RATIO * packed):
        raise BundleError(
            f"its {packed:,} bytes unpack to {size:,}, over {MAX_UNPACKED:,} or {MAX_RATIO} times "
            "as many"
        )


def _checked(entry: zipfile.ZipInfo) -> PurePosixPath:
    """An entry's path, if it is one of a regular file below the bundle's folder."""
    name = entry.filename
    parts = name.split("/")
    if name == _SETTINGS and entry.file_size > MAX_SETTINGS:
        raise BundleError(f"{name} has {entry.file_size:,} bytes, over {MAX_SETTINGS:,}")
    if (
        len(name) > MAX_NAME
        or len(parts) > MAX_DEPTH
        or not name.isprintable()
        or "\\" in name
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise BundleError(f"a name in it is not allowed: {name!r:.80}")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise BundleError(f"{name} is a link or a device")
    # Other methods unpack at once what is far larger than they say.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
        raise BundleError(f"{name} is packed in another way than Flower's")
    return PurePosixPath(name)


def _remove_others(folder: Path, target: Path) -> None:
    others = [path for path in folder.iterdir() if path != target]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) + 1 - KEPT)]:
        shutil.rmtree(path, ignore_errors=True)
