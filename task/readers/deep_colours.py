"""PNG and TIFF with 16 bits a colour, or grey with transparency: Pillow reads 8 bits of these."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile

from flwr_distill.task.image_files import (
    ON_DARK,
    VANISHED,
    Picture,
    Stored,
    check_size,
    stored_by_pillow,
)
from flwr_distill.task.readers import ImageReader, MissingPackageError, UnreadableImageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PNG = b"\x89PNG\r\n\x1a\n"
PNG_DEPTH, PNG_COLOUR = 24, 25
"""Places of both in a PNG's header."""
GREY_ALPHA, RGB, RGB_ALPHA = 4, 2, 6
TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_RGB = 2
"""Photometric interpretation."""
EXTRA_SAMPLES, PLAIN_ALPHA = 338, (2,)
"""Tag, and its value for transparency that the colours are not multiplied with."""


class DeepPng(ImageReader):
    """Reads such PNG files with torchvision."""

    def recognises(self, file: BinaryIO) -> bool:
        """Whether the header says 16 bits, and more than grey."""
        head = file.read(PNG_COLOUR + 1)
        if not head.startswith(PNG) or len(head) <= PNG_COLOUR or head[PNG_DEPTH] != 16:
            return False
        return head[PNG_COLOUR] in (GREY_ALPHA, RGB, RGB_ALPHA)

    def inspect(self, file: BinaryIO) -> Stored:
        """Describe the image by its header."""
        is_grey = _is_grey(file)
        with Image.open(file) as image:
            return _stored(image, Image.Image.getexif, is_grey=is_grey)

    def read(self, file: BinaryIO) -> Picture:
        """Decode the image with all bits."""
        is_grey = _is_grey(file)
        with Image.open(file) as image:
            if "transparency" in image.info:
                raise UnreadableImageError(
                    "has 16 bits a colour and one transparent colour",
                    remedy="save it with an alpha channel",
                )
            stored = _stored(image, type(image).getexif, is_grey=is_grey)
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        import numpy as np
        import torch
        from torchvision.io import ImageReadMode, decode_png

        file.seek(0)
        content = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        pixels = decode_png(content, ImageReadMode.UNCHANGED).numpy() / np.float32(65535)
        return Picture(_upright(pixels, orientation), stored)


def _is_grey(file: BinaryIO) -> bool:
    colour = file.read(PNG_COLOUR + 1)[PNG_COLOUR]
    file.seek(0)
    return colour == GREY_ALPHA


class DeepTiff(ImageReader):
    """Reads such TIFF files with tifffile."""

    def recognises(self, file: BinaryIO) -> bool:
        """Whether the header says 16 bits for each of red, green and blue."""
        if file.read(4) not in TIFFS:
            return False
        file.seek(0)
        try:
            with Image.open(file) as image:
                tags = getattr(image, "tag_v2", {})
        except Exception:  # Pillow will say what is wrong
            return False
        bits = tags.get(ExifTags.Base.BitsPerSample, ())
        is_rgb = tags.get(ExifTags.Base.PhotometricInterpretation) == TIFF_RGB
        return is_rgb and len(bits) > 1 and set(bits) == {16}

    def inspect(self, file: BinaryIO) -> Stored:
        """Describe the image by its header."""
        with Image.open(file) as image:
            if getattr(image, "tag_v2", {}).get(EXTRA_SAMPLES, ()) not in ((), PLAIN_ALPHA):
                raise UnreadableImageError(
                    "has samples besides red, green and blue that are no plain transparency",
                    remedy="save it without them",
                )
            return _stored(image, type(image).getexif)

    def read(self, file: BinaryIO) -> Picture:
        """Decode the image with all bits."""
        stored = self.inspect(file)
        file.seek(0)
        with Image.open(file) as image:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        try:
            import imagecodecs  # noqa: F401  # what tifffile decompresses with
            import tifffile
        except ImportError as error:
            raise MissingPackageError("tifffile", "tiff") from error
        import numpy as np

        file.seek(0)
        with tifffile.TiffFile(file) as tiff:
            page = tiff.pages.first
            if set(page.axes) != set("YXS") or page.dtype != np.uint16:
                raise UnreadableImageError("has other pixels than height x width x colours")
            check_size(page.imagelength, page.imagewidth)
            pixels = np.asarray(page.asarray() / np.float32(65535), np.float32)
        if page.axes == "YXS":
            pixels = pixels.transpose(2, 0, 1)
        return Picture(_upright(pixels, orientation), stored)


def _stored(
    image: ImageFile, exif_of: Callable[[ImageFile], Image.Exif], *, is_grey: bool = False
) -> Stored:
    """Describe a file by its header: what Pillow would reduce is scaled."""
    stored = stored_by_pillow(image, exif_of)
    treatments = (*(t for t in stored.treatments if t not in ("reduced", "scaled")), "scaled")
    mode = "LA" if is_grey else stored.mode
    return replace(stored, mode=f"{mode} 16 bits", treatments=treatments, is_grey=is_grey)


def _upright(pixels: "NDArray[np.float32]", orientation: int) -> "NDArray[np.float32]":
    """Turn pixels from 0 to 1, (C, H, W), upright, and put those with alpha (C 2 or 4) on white."""
    import numpy as np

    if len(pixels) in (2, 4):
        colours, alpha = pixels[:-1], pixels[-1:]
        pixels = colours * alpha + (1 - alpha)
        if alpha.min() < 1 and (pixels == pixels[:, :1, :1]).all():
            raise UnreadableImageError(VANISHED, remedy=ON_DARK)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(0, 2, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels, dtype=np.float32)


READERS = (DeepPng(), DeepTiff())
