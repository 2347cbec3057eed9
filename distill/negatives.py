"""Images of no class, for a node that holds few classes: what its own are to be told from.

Kernel regression on a single class has nothing to learn: its targets are constant. With images of
no class beside the real ones, the virtual images must carry what makes the class, instead of what
tells it from the one or two others that the node happens to hold.
"""

import torch
from torch import Tensor

GRID = 4


def negatives(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Make images of no class out of real ones: mirrored, transposed, or cut up and shuffled.

    They have the real images' strokes and textures in another place, and stay on the node.

    Parameters
    ----------
    images : Tensor
        (n, C, H, W), n >= 1.
    count : int
        How many to make.
    generator : torch.Generator
        Source of every draw, on the CPU.

    Returns
    -------
    Tensor
        (count, C, H, W), a third of them shuffled, in random order.
    """
    chosen = images[torch.randint(len(images), (count,), generator=generator).to(images.device)]
    kinds = torch.randint(3, (count,), generator=generator).to(images.device)
    turned = chosen.mT if images.shape[-1] == images.shape[-2] else chosen.flip(-1, -2)
    made = torch.where((kinds == 0)[:, None, None, None], chosen.flip(-1), turned)
    return torch.where((kinds == 2)[:, None, None, None], shuffled(chosen, generator), made)


def shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image into 4x4 tiles and put them in random order; a remainder stays in place."""
    count, channels, height, width = images.shape
    rows, columns = height // GRID, width // GRID
    inner = images[..., : GRID * rows, : GRID * columns]
    tiles = inner.reshape(count, channels, GRID, rows, GRID, columns).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(count, GRID * GRID, generator=generator).argsort(1).to(images.device)
    picked = tiles.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order]
    together = picked.reshape(count, GRID, GRID, *picked.shape[2:]).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[..., : GRID * rows, : GRID * columns] = together.reshape(inner.shape)
    return result
