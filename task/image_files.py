"""Image files by class: which are there, and which cannot be used.

Nothing here imports torch, so that a node's supervisor can look at its data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError

from task.errors import DatasetError

LONGEST_NAME = 60
"""Characters of a class's name."""
LONGEST = 200
"""Characters of a name or a decoder's message that are repeated."""


@dataclass(frozen=True)
class Finding:
    """Something to know about one file or sample.

    Parameters
    ----------
    kind : str
        ``unreadable`` or ``stray`` (both are skipped); ``duplicate`` of a sample of the same class,
        or ``conflict``, the same sample in another class.
    place : str
        File, relative to the data; or image or line number.
    reason : str
        What is wrong, and the remedy.
    """

    kind: Literal["unreadable", "stray", "duplicate", "conflict"]
    place: str
    reason: str


class UnusableFileError(DatasetError):
    """A file among the images is none, or cannot be decoded; `finding` has the reason."""

    def __init__(self, path: Path, kind: Literal["unreadable", "stray"], reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.finding = Finding(kind, printable(f"{path.parent.name}/{path.name}"), reason)


def class_folders(root: Path) -> list[Path]:
    """Folders of the classes in sorted order; hidden ones are skipped."""
    folders = [path for path in visible(root) if path.is_dir()]
    if not folders:
        raise DatasetError(f"{root}: has no class folders; sort the images into one per class")
    return folders


def class_names(path: str | Path) -> tuple[str, ...]:
    """Names of the class folders below a path, sorted; empty if they are numbers or not there.

    Raises
    ------
    DatasetError
        If a name cannot stand in ``private.classes``.
    """
    path = Path(path)
    folders = [folder for folder in visible(path) if folder.is_dir()] if path.is_dir() else []
    names = tuple(folder.name for folder in folders)
    if all(name.isdecimal() for name in names):
        return ()
    for name in names:
        if "," in name or not name.isprintable() or len(name) > LONGEST_NAME:
            raise DatasetError(
                f"{path}: class folder {name!r} needs another name: printable, without a comma, at "
                f"most {LONGEST_NAME} characters"
            )
    return names


def beside_class_folders(root: Path) -> list[Finding]:
    """Files that lie beside the class folders, where nothing reads them."""
    reason = "lies beside the class folders; move it into one, or remove it"
    return [
        Finding("stray", printable(path.name), reason)
        for path in visible(root)
        if not path.is_dir()
    ]


def visible(folder: Path) -> list[Path]:
    """What is in a folder, in sorted order, but for hidden files."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DatasetError(
            f"{folder}: cannot be listed ({error.strerror}); let this user read it"
        ) from error


def open_image(path: Path, *, decode: bool = True) -> Image.Image:
    """Open an image file; links are followed.

    With ``decode=False`` only its header is read, and its size and mode can be asked for.

    Raises
    ------
    UnusableFileError
        If it is no image file, cannot be decoded, has more than 8 bits per pixel, or is larger than
        Pillow's limit against decompression bombs.
    """
    try:
        if path.is_dir():
            reason = "is a folder within a class folder; move its images up, or remove it"
            raise UnusableFileError(path, "stray", reason)
        if not path.is_file():  # a pipe would be waited for
            reason = "is neither a file nor a link to one; remove it"
            raise UnusableFileError(path, "stray", reason)
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                reason = f"has more than 8 bits per pixel (mode {image.mode}); save it with pixels "
                raise UnusableFileError(path, "unreadable", f"{reason}0 to 255")
            if image.mode in ("LAB", "La"):  # Pillow cannot convert these to grey
                reason = f"has the mode {image.mode}; save it as RGB or grey"
                raise UnusableFileError(path, "unreadable", reason)
            if decode:
                image.load()
            return image
    except UnusableFileError:
        raise
    except UnidentifiedImageError as error:
        if path.suffix.lower() not in Image.registered_extensions():
            reason = "is not an image; move it elsewhere"
            raise UnusableFileError(path, "stray", reason) from error
        reason = "not a readable image (its content is of no known format); replace or remove it"
        raise UnusableFileError(path, "unreadable", reason) from error
    except Exception as error:  # damaged files make Pillow's decoders raise errors of many kinds
        why = printable(str(getattr(error, "strerror", None) or error or type(error).__name__))
        reason = f"not a readable image ({why}); replace or remove it"
        raise UnusableFileError(path, "unreadable", reason) from error


def printable(text: str) -> str:
    """Text of others for a log or a console: cut, and without control characters."""
    return (text if text.isprintable() else ascii(text))[:LONGEST]
