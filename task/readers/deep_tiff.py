"""TIFF with 16 bits a colour, of which Pillow reads 8."""

from typing import BinaryIO

from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile

from flwr_distill.task.image_files import Picture, Stored, check_size
from flwr_distill.task.readers import ImageReader, MissingPackageError, UnreadableImageError
from flwr_distill.task.readers.deep_pixels import deep_stored, shown

STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
RGB = 2
"""Photometric interpretation."""
PLAIN_ALPHA = (2,)
"""Extra samples: one of transparency that the colours are not multiplied with."""


class DeepTiff(ImageReader):
    """Reads such files with tifffile."""

    def recognises(self, file: BinaryIO) -> bool:
        """Whether the header says 16 bits for each of red, green and blue."""
        if file.read(4) not in STARTS:
            return False
        file.seek(0)
        try:
            with Image.open(file) as image:
                tags = getattr(image, "tag_v2", {})
        except Exception:  # Pillow will say what is wrong
            return False
        bits = tags.get(ExifTags.Base.BitsPerSample, ())
        is_rgb = tags.get(ExifTags.Base.PhotometricInterpretation) == RGB
        return is_rgb and len(bits) > 1 and set(bits) == {16}

    def inspect(self, file: BinaryIO) -> Stored:
        """Describe the image by its header."""
        with Image.open(file) as image:
            return _stored(image)

    def read(self, file: BinaryIO) -> Picture:
        """Decode the image with all bits."""
        with Image.open(file) as image:
            stored = _stored(image)
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
        return Picture(shown(pixels, orientation), stored)


def _stored(image: ImageFile) -> Stored:
    extra = getattr(image, "tag_v2", {}).get(_EXTRA_SAMPLES, ())
    if extra not in ((), PLAIN_ALPHA):
        raise UnreadableImageError(
            "has samples besides red, green and blue that are no plain transparency; save it "
            "without them"
        )
    return deep_stored(image, type(image).getexif)


_EXTRA_SAMPLES = 338
READER = DeepTiff()
