"""PNG with 16 bits a colour, or 16-bit grey with transparency: Pillow reads 8 bits of these."""

from typing import BinaryIO

from PIL import ExifTags, Image

from flwr_distill.task.image_files import Picture, Stored
from flwr_distill.task.readers import ImageReader, UnreadableImageError
from flwr_distill.task.readers.deep_pixels import deep_stored, shown

SIGNATURE = b"\x89PNG\r\n\x1a\n"
DEPTH, COLOUR = 24, 25
"""Places of both in the header."""
GREY_ALPHA, RGB, RGB_ALPHA = 4, 2, 6


class DeepPng(ImageReader):
    """Reads such files with torchvision."""

    def recognises(self, file: BinaryIO) -> bool:
        """Whether the header says 16 bits, and more than grey."""
        head = file.read(COLOUR + 1)
        if not head.startswith(SIGNATURE) or len(head) <= COLOUR or head[DEPTH] != 16:
            return False
        return head[COLOUR] in (GREY_ALPHA, RGB, RGB_ALPHA)

    def inspect(self, file: BinaryIO) -> Stored:
        """Describe the image by its header."""
        is_grey = _is_grey(file)
        with Image.open(file) as image:
            return deep_stored(image, Image.Image.getexif, is_grey=is_grey)

    def read(self, file: BinaryIO) -> Picture:
        """Decode the image with all bits."""
        is_grey = _is_grey(file)
        with Image.open(file) as image:
            if "transparency" in image.info:
                raise UnreadableImageError(
                    "has 16 bits a colour and one transparent colour; save it with an alpha channel"
                )
            stored = deep_stored(image, type(image).getexif, is_grey=is_grey)
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        import numpy as np
        import torch
        from torchvision.io import ImageReadMode, decode_png

        file.seek(0)
        content = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        pixels = decode_png(content, ImageReadMode.UNCHANGED).numpy() / np.float32(65535)
        return Picture(shown(pixels, orientation), stored)


def _is_grey(file: BinaryIO) -> bool:
    colour = file.read(COLOUR + 1)[COLOUR]
    file.seek(0)
    return colour == GREY_ALPHA


READER = DeepPng()
