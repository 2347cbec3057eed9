"""Image files by class, and the one reader of image files.

Formats that Pillow does not read, or not without loss, have readers in `task.readers`. Nothing here
imports NumPy or torch before pixels are read, so that a node's supervisor can inspect its data.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from flwr_distill.task.errors import DatasetError
from flwr_distill.task.labels import in_order, is_position, names_problem
from flwr_distill.task.readers import (
    MissingPackageError,
    UnreadableImageError,
    data_reader,
    image_reader,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TEXT = 200
"""Characters of a name or a decoder's message that are repeated."""
BACKGROUND = "white"
"""Colour behind transparent pixels."""
VANISHED = f"shows nothing on {BACKGROUND}, where transparency is put"
ON_DARK = "save it on a dark background"
SCALE_FLOATS = "scale them by the same rule on all nodes (8-bit values: divide by 255)"

MAX_BYTES = 1 << 30
"""Size of an image file; of uncompressed pixels Pillow's limit allows about as many."""
MAX_PAGES = 64
"""Pages of a TIFF that may be smaller copies of its first one."""

Treatment = Literal["turned", "on background", "scaled", "reduced", "windowed", "inverted"]


@dataclass(frozen=True)
class Finding:
    """Something to know about one file or sample.

    Parameters
    ----------
    kind : str
        ``unreadable`` or ``stray`` (both are skipped); ``duplicate`` of a sample of the same class,
        or ``conflict``, the same sample in another class; of a table's columns ``constant``, or
        ``overflow`` and ``unit``, which a run refuses.
    place : str
        File, relative to the data; or image or line number, or column.
    reason : str
        What is wrong, and the remedy.
    """

    kind: Literal["unreadable", "stray", "duplicate", "conflict", "constant", "overflow", "unit"]
    place: str
    reason: str


class UnusableFileError(DatasetError):
    """A file among the images is not one, or cannot be decoded; `finding` has the reason."""

    def __init__(
        self, path: Path, kind: Literal["unreadable", "stray"], problem: str, remedy: str
    ) -> None:
        super().__init__(problem, where=path, remedy=remedy)
        reason = f"{problem} ({remedy})" if remedy else problem
        self.finding = Finding(kind, printable(f"{path.parent.name}/{path.name}"), reason)


def class_names(path: str | Path) -> tuple[str, ...]:
    """Names of the classes of images, in order; empty if they are positions, or nothing is there.

    Raises DatasetError if the data cannot be read, or a name cannot stand in ``private.classes``.
    """
    path = Path(path)
    reader = data_reader(path)
    names = in_order(reader.classes(path)) if reader else ()
    if all(map(is_position, names)):
        return ()
    if problem := names_problem(names):
        raise DatasetError(problem, where=f"{path}, classes")
    if odd := [name for name in names if "," in name]:
        raise DatasetError("needs another name, without a comma", where=path, value=odd[0])
    return names


def visible(folder: Path) -> list[Path]:
    """Sorted content of a folder without hidden files."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        problem = f"cannot be listed ({error.strerror})"
        raise DatasetError(problem, where=folder, remedy="let this user read it") from error


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
        ``turned`` by its EXIF orientation; transparency put ``on background``; more than 8 bits
        ``scaled`` to 0 to 1; 16 bits a colour ``reduced`` to 8, which Pillow reads of them; grey
        values ``windowed``, or ``inverted`` because white is stored as 0.
    """

    size: tuple[int, int]
    mode: str
    treatments: tuple[Treatment, ...]
    is_grey: bool


@dataclass(frozen=True)
class Picture:
    """An image file as every command reads it.

    Parameters
    ----------
    pixels : ndarray
        Upright and opaque, (1 or 3, H, W): uint8, or float32 from 0 to 1 of files with more than
        8 bits for each channel.
    """

    pixels: "NDArray[np.uint8 | np.float32]"
    stored: Stored

    def pixel_range(self) -> tuple[float, float]:
        """Darkest and brightest value of all channels, from 0 to 1."""
        largest = 255 if self.pixels.dtype == "uint8" else 1
        return float(self.pixels.min()) / largest, float(self.pixels.max()) / largest

    def in_8_bits(self) -> Image.Image:
        """Return the image for the eye, in ``L`` or ``RGB``."""
        pixels = self.pixels
        if pixels.dtype != "uint8":
            pixels = (pixels * 255).round().astype("uint8")
        return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


@dataclass(frozen=True)
class Encoded:
    """An image file within another file.

    Parameters
    ----------
    path : Path
        The other file, and the image's name in it.
    """

    path: Path
    content: bytes


def open_image(file: Path | Encoded) -> Picture:
    """Read an image file as a viewer shows it; links are followed. All commands read images so.

    Its EXIF orientation is applied. Transparent pixels are put on `BACKGROUND`. Grey of 16 bits is
    divided by 65,535, and floats from 0 to 1 are kept. Of an animation the first frame is read.

    Raises
    ------
    UnusableFileError
        If it is no image file or cannot be decoded; is larger than `MAX_BYTES`, or than Pillow's
        limit against decompression bombs; has pixels of an unknown range, or several pages; or
        shows nothing on `BACKGROUND`.
    DatasetError
        If its reader needs a package that is missing.
    """
    with _opened(file) as content:
        if reader := image_reader(content):
            return reader.read(content)
        with Image.open(content) as image:
            return _read(image)


def inspect_image(file: Path | Encoded) -> Stored:
    """Read the header of an image file alone; raise UnusableFileError as `open_image` does."""
    with _opened(file) as content:
        if reader := image_reader(content):
            return reader.inspect(content)
        with Image.open(content) as image:
            # A PNG's own getexif decodes it, because an orientation may follow the pixels.
            return stored_by_pillow(image, Image.Image.getexif)


def check_size(height: int, width: int) -> None:
    """Raise UnreadableImageError for an image beyond Pillow's limit against decompression bombs."""
    if Image.MAX_IMAGE_PIXELS and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        raise UnreadableImageError(
            f"has {height} x {width} pixels, need at most {2 * Image.MAX_IMAGE_PIXELS:,}",
            remedy="save it smaller",
        )


def float_problem(lowest: float, highest: float) -> str:
    """Problem of float pixels in this range, for which the remedy is `SCALE_FLOATS`; or nothing."""
    if lowest >= 0 and highest <= 1:  # not so for nan
        return ""
    return f"has float pixels from {lowest:g} to {highest:g}, need 0 to 1"


@contextmanager
def _opened(file: Path | Encoded) -> Iterator[BinaryIO]:
    path = file if isinstance(file, Path) else file.path
    try:
        if isinstance(file, Encoded):
            yield io.BytesIO(file.content)
            return
        if path.is_dir():
            problem = "is a folder within a class folder"
            raise UnusableFileError(path, "stray", problem, "move its images up, or remove it")
        if not path.is_file():  # opening a pipe would wait
            raise UnusableFileError(
                path, "stray", "is neither a file nor a link to one", "remove it"
            )
        with path.open("rb") as content:
            if path.stat().st_size > MAX_BYTES:
                raise UnreadableImageError(
                    f"has more than {MAX_BYTES:,} bytes", remedy="save it smaller"
                )
            yield content
    except MissingPackageError as error:  # no fault of the file, so a run must not skip it
        raise DatasetError(error.problem, where=path, remedy=error.remedy) from error
    except UnusableFileError:
        raise
    except UnreadableImageError as error:
        raise UnusableFileError(path, "unreadable", error.problem, error.remedy) from error
    except UnidentifiedImageError as error:
        if path.suffix.lower() not in Image.registered_extensions():
            raise UnusableFileError(
                path, "stray", "is not an image", "move it elsewhere"
            ) from error
        problem = "not a readable image: its content is of no known format"
        raise UnusableFileError(path, "unreadable", problem, "replace or remove it") from error
    except Exception as error:  # damaged files make Pillow's decoders raise errors of many kinds
        why = printable(str(getattr(error, "strerror", None) or error or type(error).__name__))
        problem = f"not a readable image: {why}"
        raise UnusableFileError(path, "unreadable", problem, "replace or remove it") from error


def _read(image: ImageFile) -> Picture:
    import numpy as np  # here: a supervisor only inspects files, and must stay small

    largest = _largest(image)
    stored = stored_by_pillow(image, type(image).getexif)
    ImageOps.exif_transpose(image, in_place=True)
    if "scaled" in stored.treatments:
        shown = image.convert("F").point(lambda value: value / largest)
    else:
        opaque = _on_background(image) if "on background" in stored.treatments else image
        shown = opaque.convert("L" if stored.is_grey else "RGB")
        if _has_vanished(image, shown):
            raise UnreadableImageError(VANISHED, remedy=ON_DARK)
    pixels = np.asarray(shown)
    if "scaled" in stored.treatments and (problem := float_problem(pixels.min(), pixels.max())):
        raise UnreadableImageError(problem, remedy=SCALE_FLOATS)
    return Picture(pixels[None] if stored.is_grey else pixels.transpose(2, 0, 1), stored)


def stored_by_pillow(image: ImageFile, exif_of: Callable[[ImageFile], Image.Exif]) -> Stored:
    """Describe a file by its header; refuse it if the meaning of its pixels is unknown."""
    _check_known_pixels(image)
    orientation = exif_of(image).get(ExifTags.Base.Orientation, 1)
    height, width = image.height, image.width
    if orientation in range(5, 9) and image.format != "TIFF":  # whose size Pillow has turned
        height, width = width, height
    applies: dict[Treatment, bool] = {
        "turned": orientation in range(2, 9),
        "on background": image.has_transparency_data,
        "scaled": _is_deep(image),
        "reduced": _is_reduced(image),
    }
    treatments = tuple(t for t in applies if applies[t])
    is_grey = Image.getmodebase(image.mode) == "L"
    return Stored((height, width), image.mode, treatments, is_grey)


def _check_known_pixels(image: ImageFile) -> None:
    problem = remedy = ""
    if image.mode == "LAB":  # Pillow cannot convert it
        problem, remedy = "has the mode LAB", "save it as RGB or grey"
    elif image.mode == "I" and image.format not in ("PNG", "PPM"):  # these have 16 bits
        problem = "has 32-bit integers as pixels, whose range is unknown"
        remedy = "save it with 16 bits, or with floats from 0 to 1"
    elif _is_deep(image) and (image.has_transparency_data or _is_inverted(image)):
        problem = "has more than 8 bits, and a transparent value or white as 0"
        remedy = "save it as plain grey"
    elif image.format == "TIFF" and _has_pages(image):
        problem, remedy = "has several pages", "save each as a separate file"
    if problem:
        raise UnreadableImageError(problem, remedy=remedy)


def _has_pages(image: ImageFile) -> bool:
    """Whether a TIFF has pages besides its first one and smaller copies of that."""
    try:
        for page in range(1, MAX_PAGES):
            image.seek(page)
            kind = getattr(image, "tag_v2", {}).get(_SUBFILE_TYPE, 0)
            if not kind & _REDUCED_COPY:
                return True
    except EOFError:
        return False
    finally:
        image.seek(0)
    return True


_SUBFILE_TYPE, _REDUCED_COPY = 254, 1


def _is_deep(image: ImageFile) -> bool:
    """Whether Pillow reads more than 8 bits of each pixel."""
    return image.mode.startswith(("I", "F"))


def _is_reduced(image: ImageFile) -> bool:
    """Whether Pillow reads 8 of 16 bits a colour."""
    if image.format == "PPM" and image.mode == "RGB":
        largest = image.tile[0].args if image.tile else ()
        return isinstance(largest, tuple) and int(largest[-1]) > 255
    return _raw_mode(image).startswith(_SIXTEEN_BITS_A_COLOUR)


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


def _on_background(image: Image.Image) -> Image.Image:
    pixels = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", pixels.size, BACKGROUND), pixels)


def _has_vanished(image: Image.Image, shown: Image.Image) -> bool:
    """Whether an image has transparent pixels and then shows one colour alone."""
    if not image.has_transparency_data or shown.getcolors(1) is None:
        return False
    return image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def printable(text: str) -> str:
    """Text of others for a log or a console: cut, and without control characters."""
    return (text if text.isprintable() else ascii(text))[:MAX_TEXT]
