"""Image files by class, and the one reader of image files.

Formats that Pillow does not read, or not without loss, have readers in `task.readers`. Nothing here
imports NumPy or torch before pixels are read, so that a node's supervisor can look at its data.
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
from flwr_distill.task.labels import in_order, is_position, names_problem, same_number
from flwr_distill.task.readers import (
    MissingPackageError,
    UnreadableImageError,
    data_reader,
    image_reader,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 200
"""Characters of a name or a decoder's message that are repeated."""
BACKGROUND = "white"
"""What transparent pixels are shown on."""

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
    """Names of the classes of images, in order; empty if they are positions or not there.

    They are those of class folders, or what the data's reader says.

    Raises
    ------
    DatasetError
        If the data cannot be read, or a name cannot stand in ``private.classes``.
    """
    path = Path(path)
    reader = data_reader(path)
    names = in_order(reader.classes(path)) if reader else ()
    if all(map(is_position, names)):
        return ()
    if problem := names_problem(names):
        raise DatasetError(f"{path}: classes: {problem}")
    if odd := [name for name in names if "," in name]:
        raise DatasetError(f"{path}: class {odd[0]!r} needs another name, without a comma")
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
        bits ``scaled`` to 0 to 1; or 16 bits a colour ``reduced`` to 8, which Pillow reads of them;
        grey values ``windowed``, or ``inverted`` because they are stored with white as 0.
    is_grey : bool
        Whether it has no colours.
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
    stored : Stored
        What it was read from.
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
        The other file, and its name there.
    content : bytes
        The image file.
    """

    path: Path
    content: bytes


def open_image(file: Path | Encoded) -> Picture:
    """Read an image file as a viewer shows it; links are followed. The one reader of all commands.

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
    """Read the header of an image file alone; raise UnusableFileError as `open_image` does.

    Damage behind the header is not found.
    """
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
            f"has {height} x {width} pixels, need at most {2 * Image.MAX_IMAGE_PIXELS:,}; save it "
            "smaller"
        )


def float_problem(lowest: float, highest: float) -> str:
    """Describe what is wrong with float pixels of a range, or nothing if they are from 0 to 1."""
    if lowest >= 0 and highest <= 1:  # not so for nan
        return ""
    return (
        f"has float pixels from {lowest:g} to {highest:g}, need 0 to 1; scale them by the same "
        "rule on all nodes (8-bit values: divide by 255)"
    )


@contextmanager
def _opened(file: Path | Encoded) -> Iterator[BinaryIO]:
    path = file if isinstance(file, Path) else file.path
    try:
        if isinstance(file, Encoded):
            yield io.BytesIO(file.content)
            return
        if path.is_dir():
            reason = "is a folder within a class folder; move its images up, or remove it"
            raise UnusableFileError(path, "stray", reason)
        if not path.is_file():  # a pipe would be waited for
            reason = "is neither a file nor a link to one; remove it"
            raise UnusableFileError(path, "stray", reason)
        with path.open("rb") as content:
            if path.stat().st_size > MAX_BYTES:
                raise UnreadableImageError(f"has more than {MAX_BYTES:,} bytes; save it smaller")
            yield content
    except MissingPackageError as error:  # no fault of the file, so a run must not skip it
        raise DatasetError(f"{path}: {error}") from error
    except UnusableFileError:
        raise
    except UnreadableImageError as error:
        raise UnusableFileError(path, "unreadable", str(error)) from error
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
            raise UnreadableImageError(VANISHED)
    pixels = np.asarray(shown)
    if "scaled" in stored.treatments and (problem := float_problem(pixels.min(), pixels.max())):
        raise UnreadableImageError(problem)
    return Picture(pixels[None] if stored.is_grey else pixels.transpose(2, 0, 1), stored)


VANISHED = f"shows nothing on {BACKGROUND}, where transparency is put; save it on a dark background"


def stored_by_pillow(image: ImageFile, exif_of: Callable[[ImageFile], Image.Exif]) -> Stored:
    """Describe a file by its header; refuse it if that does not say what its pixels mean."""
    if reason := _unknown_pixels(image):
        raise UnreadableImageError(reason)
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


def _unknown_pixels(image: ImageFile) -> str:
    if image.mode == "LAB":  # Pillow cannot convert it
        return "has the mode LAB; save it as RGB or grey"
    if image.mode == "I" and image.format not in ("PNG", "PPM"):  # these have 16 bits
        remedy = "save it with 16 bits, or with floats from 0 to 1"
        return f"has 32-bit integers as pixels, whose range is unknown; {remedy}"
    if _is_deep(image) and (image.has_transparency_data or _is_inverted(image)):
        remedy = "save it as plain grey"
        return f"has more than 8 bits, and a transparent value or white as 0; {remedy}"
    if image.format == "TIFF" and _has_pages(image):
        return "has several pages; save each as a file of its own"
    return ""


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
    """Whether some of an image is transparent, and no more than one colour is left to see."""
    if not image.has_transparency_data or shown.getcolors(1) is None:
        return False
    return image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def printable(text: str) -> str:
    """Text of others for a log or a console: cut, and without control characters."""
    return (text if text.isprintable() else ascii(text))[:LONGEST]
