"""Image files by class, and the one reader of image files.

Nothing here imports torch, so that a node's supervisor can look at its data.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from task.errors import DatasetError
from task.labels import in_order, is_position, names_problem, same_number

LONGEST = 200
"""Characters of a name or a decoder's message that are repeated."""
BACKGROUND = "white"
"""What transparent pixels are shown on."""

Treatment = Literal["turned", "on background", "scaled", "reduced"]


@dataclass(frozen=True)
class Finding:
    """Something to know about one file or sample.

    Parameters
    ----------
    kind : str
        ``unreadable`` or ``stray`` (both are skipped); ``duplicate`` of a sample of the same class,
        or ``conflict``, the same sample in another class; of a table's columns ``constant``, or
        ``overflow``, which a run refuses.
    place : str
        File, relative to the data; or image or line number, or column.
    reason : str
        What is wrong, and the remedy.
    """

    kind: Literal["unreadable", "stray", "duplicate", "conflict", "constant", "overflow"]
    place: str
    reason: str


class UnusableFileError(DatasetError):
    """A file among the images is none, or cannot be decoded; `finding` has the reason."""

    def __init__(self, path: Path, kind: Literal["unreadable", "stray"], reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.finding = Finding(kind, printable(f"{path.parent.name}/{path.name}"), reason)


def class_folders(root: Path) -> list[Path]:
    """Folders of the classes, by name as `task.labels.in_order`; hidden ones are skipped.

    Raises
    ------
    DatasetError
        If there are none, or two are the same number, such as ``1`` and ``01``.
    """
    names = in_order(path.name for path in visible(root) if path.is_dir())
    if not names:
        raise DatasetError(f"{root}: has no class folders; sort the images into one per class")
    if problem := same_number(names):
        raise DatasetError(f"{root}: class folders {problem}")
    return [root / name for name in names]


def class_names(path: str | Path) -> tuple[str, ...]:
    """Names of the class folders below a path, in order; empty if they are positions or not there.

    Raises
    ------
    DatasetError
        As `class_folders`, or if a name cannot stand in ``private.classes``.
    """
    if not Path(path).is_dir():
        return ()
    names = tuple(folder.name for folder in class_folders(Path(path)))
    if all(map(is_position, names)):
        return ()
    if problem := names_problem(names):
        raise DatasetError(f"{path}: class folders: {problem}")
    if odd := [name for name in names if "," in name]:
        raise DatasetError(f"{path}: class folder {odd[0]!r} needs another name, without a comma")
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


@dataclass(frozen=True)
class Stored:
    """How a file stores an image, and what its reader does about it.

    Parameters
    ----------
    size : tuple[int, int]
        Height and width as a viewer shows them.
    mode : str
        Pillow's mode of the stored pixels, such as ``RGB``, or the type of an array's values.
    treatments : tuple[Treatment, ...]
        ``turned`` as its EXIF orientation says; transparency put ``on background``; more than 8
        bits ``scaled`` to 0 to 1; or 16 bits a colour ``reduced`` to 8, which Pillow reads of them.
    """

    size: tuple[int, int]
    mode: str
    treatments: tuple[Treatment, ...] = ()

    @property
    def is_grey(self) -> bool:
        """Whether it has no colours."""
        return Image.getmodebase(self.mode) == "L"


@dataclass(frozen=True)
class Picture:
    """An image file as every command reads it.

    Parameters
    ----------
    image : Image.Image
        Upright and opaque. Its mode is ``L`` or ``RGB``, or ``F`` for grey values from 0 to 1 of
        files with more than 8 bits per pixel.
    stored : Stored
        What it was read from.
    """

    image: Image.Image
    stored: Stored

    def pixel_range(self) -> tuple[float, float]:
        """Darkest and brightest value of all channels, from 0 to 1."""
        largest = 1 if self.image.mode == "F" else 255
        extrema: Any = self.image.getextrema()  # of one channel no tuple of pairs
        pairs = [extrema] if len(self.image.getbands()) == 1 else extrema
        return min(low for low, _ in pairs) / largest, max(high for _, high in pairs) / largest

    def in_8_bits(self) -> Image.Image:
        """Return the image for the eye, in ``L`` or ``RGB``."""
        if self.image.mode == "F":
            return self.image.point(lambda value: value * 255).convert("L")
        return self.image


def open_image(path: Path) -> Picture:
    """Read an image file as a viewer shows it; links are followed. The one reader of all commands.

    Its EXIF orientation is applied. Transparent pixels are put on `BACKGROUND`. Grey of 16 bits is
    divided by 65,535, and floats from 0 to 1 are kept. Of several frames the first one is read.

    Raises
    ------
    UnusableFileError
        If it is no image file or cannot be decoded; is larger than Pillow's limit against
        decompression bombs; has pixels of an unknown range; or shows nothing on `BACKGROUND`.
    """
    with _opened(path) as image:
        largest = _largest(image)
        stored = _stored(image, path, type(image).getexif)
        ImageOps.exif_transpose(image, in_place=True)
        if "scaled" in stored.treatments:
            shown = _scaled(image, largest, path)
        else:
            opaque = _on_background(image) if "on background" in stored.treatments else image
            shown = opaque.convert("L" if stored.is_grey else "RGB")
            if _has_vanished(image, shown):
                reason = f"shows nothing on {BACKGROUND}, where transparency is put; save it on a "
                raise UnusableFileError(path, "unreadable", f"{reason}dark background")
        return Picture(shown, stored)


def inspect_image(path: Path) -> Stored:
    """Read the header of an image file alone; raise UnusableFileError as `open_image` does.

    Damage behind the header is not found.
    """
    with _opened(path) as image:
        # A PNG's own getexif decodes it, because an orientation may follow the pixels.
        return _stored(image, path, Image.Image.getexif)


def float_problem(lowest: float, highest: float) -> str:
    """Describe what is wrong with float pixels of a range, or nothing if they are from 0 to 1."""
    if lowest >= 0 and highest <= 1:  # not so for nan
        return ""
    return (
        f"has float pixels from {lowest:g} to {highest:g}, need 0 to 1; scale them by the same "
        "rule on all nodes (8-bit values: divide by 255)"
    )


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    try:
        if path.is_dir():
            reason = "is a folder within a class folder; move its images up, or remove it"
            raise UnusableFileError(path, "stray", reason)
        if not path.is_file():  # a pipe would be waited for
            reason = "is neither a file nor a link to one; remove it"
            raise UnusableFileError(path, "stray", reason)
        with Image.open(path) as image:
            yield image
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


def _stored(image: ImageFile, path: Path, exif_of: Callable[[ImageFile], Image.Exif]) -> Stored:
    """Describe a file by its header; refuse it if that does not say what its pixels mean."""
    if reason := _unknown_pixels(image):
        raise UnusableFileError(path, "unreadable", reason)
    is_reduced = _raw_mode(image).startswith(_SIXTEEN_BITS_A_COLOUR)
    orientation = exif_of(image).get(ExifTags.Base.Orientation, 1)
    height, width = image.height, image.width
    if orientation in range(5, 9) and image.format != "TIFF":  # whose size Pillow has turned
        height, width = width, height
    applies: dict[Treatment, bool] = {
        "turned": orientation in range(2, 9),
        "on background": image.has_transparency_data,
        "scaled": _is_deep(image),
        "reduced": is_reduced,
    }
    return Stored((height, width), image.mode, tuple(t for t in applies if applies[t]))


def _unknown_pixels(image: ImageFile) -> str:
    if image.mode == "LAB":  # Pillow cannot convert it
        return "has the mode LAB; save it as RGB or grey"
    if image.mode == "I" and image.format not in ("PNG", "PPM"):  # these have 16 bits
        remedy = "save it with 16 bits, or with floats from 0 to 1"
        return f"has 32-bit integers as pixels, whose range is unknown; {remedy}"
    if _is_deep(image) and (image.has_transparency_data or _is_inverted(image)):
        remedy = "save it as plain grey"
        return f"has more than 8 bits, and a transparent value or white as 0; {remedy}"
    return ""


def _is_deep(image: ImageFile) -> bool:
    """Whether Pillow reads more than 8 bits of each pixel."""
    return image.mode.startswith(("I", "F"))


def _raw_mode(image: ImageFile) -> str:
    """How the file lays its pixels out, by Pillow's name."""
    arguments = image.tile[0].args if image.tile else ""
    return str(arguments[0] if isinstance(arguments, tuple) else arguments)


_SIXTEEN_BITS_A_COLOUR = ("RGB;16", "RGBA;16", "RGBX;16", "CMYK;16", "LA;16")


def _largest(image: ImageFile) -> int:
    """The largest possible value of an image with more than 8 bits; 1 of floats."""
    if image.mode == "F":
        return 1
    return 4095 if _raw_mode(image) == "I;12" else 65535


def _is_inverted(image: ImageFile) -> bool:
    return getattr(image, "tag_v2", {}).get(ExifTags.Base.PhotometricInterpretation) == 0


def _scaled(image: Image.Image, largest: int, path: Path) -> Image.Image:
    """Grey of more than 8 bits, from 0 to 1."""
    import numpy as np  # here: a supervisor only inspects files, and must stay small

    shown = image.convert("F").point(lambda value: value / largest)
    pixels = np.asarray(shown)
    if problem := float_problem(pixels.min(), pixels.max()):
        raise UnusableFileError(path, "unreadable", problem)
    return shown


def _on_background(image: Image.Image) -> Image.Image:
    pixels = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", pixels.size, BACKGROUND), pixels)


def _has_vanished(image: Image.Image, shown: Image.Image) -> bool:
    """Whether some of an image is transparent, and no more than one colour is left to see."""
    if not image.has_transparency_data or shown.getcolors(1) is None:
        return False
    return image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def printable(text: str) -> str:
    """Text of others for a log or a console: cut, and without control characters."""
    return (text if text.isprintable() else ascii(text))[:LONGEST]
