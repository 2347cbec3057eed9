"""What readers of images with 16 bits a colour share."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from PIL import Image
from PIL.ImageFile import ImageFile

from flwr_distill.task.image_files import VANISHED, Stored, stored_by_pillow
from flwr_distill.task.readers import UnreadableImageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def deep_stored(
    image: ImageFile, exif_of: Callable[[ImageFile], Image.Exif], *, is_grey: bool = False
) -> Stored:
    """Describe a file by its header: what Pillow would reduce is scaled."""
    stored = stored_by_pillow(image, exif_of)
    treatments = (*(t for t in stored.treatments if t not in ("reduced", "scaled")), "scaled")
    mode = "LA" if is_grey else stored.mode
    return replace(stored, mode=f"{mode} 16 bits", treatments=treatments, is_grey=is_grey)


def shown(pixels: "NDArray[np.float32]", orientation: int) -> "NDArray[np.float32]":
    """Turn pixels from 0 to 1, (C, H, W), upright, and put those with alpha (C 2 or 4) on white."""
    import numpy as np

    if len(pixels) in (2, 4):
        colours, alpha = pixels[:-1], pixels[-1:]
        pixels = colours * alpha + (1 - alpha)
        if alpha.min() < 1 and (pixels == pixels[:, :1, :1]).all():
            raise UnreadableImageError(VANISHED)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(0, 2, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels, dtype=np.float32)
