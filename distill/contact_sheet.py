"""A picture of virtual images, with one row per class."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

COLUMNS = 20
TILE = 48
GAP = 2
LETTER = 7
WHITE = 255


def contact_sheet(
    images: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    formation: int = 1,
    limits: tuple[float, float] | None = None,
) -> Image.Image:
    """Draw at most 20 images (n, C, H, W) per class in rows, each headed by the class name.

    Images are in colour if C is 3, else grey, by the mean over channels. Small ones are enlarged by
    whole factors, and more so if they contain others (`formation`). `limits` are the values of
    black and white: by default the 0.5th and 99.5th percentile of all pixels, because virtual
    images have no bounded range.
    """
    images = images if images.shape[1] == 3 else images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    shown = {int(c): images[labels == c][:COLUMNS] for c in labels.unique()}  # type: ignore[no-untyped-call]
    low, high = limits or np.percentile(images.numpy(), [0.5, 99.5])
    factor = max(1, formation * TILE // max(images.shape[2:]))
    height, width = (side * factor + GAP for side in images.shape[2:])
    margin = GAP + LETTER * (1 + max(len(class_names[c]) for c in shown))
    sheet = Image.new(
        "RGB",
        (margin + width * max(map(len, shown.values())), GAP + height * len(shown)),
        (WHITE,) * 3,
    )
    draw = ImageDraw.Draw(sheet)
    for row, (c, members) in enumerate(shown.items()):
        top = GAP + row * height
        draw.text((GAP, top + height // 2), class_names[c], fill="black", anchor="lm")
        for column, image in enumerate(members):
            scaled = (image.numpy() - low) / ((high - low) or 1.0)
            pixels = (WHITE * scaled.clip(0, 1)).round().astype(np.uint8).transpose(1, 2, 0)
            tile = Image.fromarray(pixels)
            enlarged = tile.resize((width - GAP, height - GAP), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (margin + column * width, top))
    return sheet
