"""Images of no class, to contrast with the images of a node that has few classes.

Kernel regression on a single class has nothing to learn. Against images of no class, virtual images
must show what makes the class.
"""

import torch
from torch import Tensor

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.features import are_vectors

GRID = 4


def negatives(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Make images of no class from real ones: mirrored, transposed, or cut up and shuffled.

    They have the real images' strokes and textures in other places, and stay on the node. Vectors
    have no parts to move: DistillError.
    """
    if count and are_vectors(images.shape):
        raise DistillError(
            f"kip-negatives cuts up images, and samples are vectors of {images.shape[1]} numbers "
            "(take dm)"
        )
    chosen = images[torch.randint(len(images), (count,), generator=generator).to(images.device)]
    kinds = torch.randint(3, (count,), generator=generator).to(images.device)
    turned = chosen.mT if images.shape[-1] == images.shape[-2] else chosen.flip(-1, -2)
    moved = torch.where((kinds == 0)[:, None, None, None], chosen.flip(-1), turned)
    return torch.where((kinds == 2)[:, None, None, None], shuffled(chosen, generator), moved)


def shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image into 4x4 tiles and shuffle them; remaining pixels stay in place."""
    count, channels, height, width = images.shape
    rows, columns = height // GRID, width // GRID
    inner = images[..., : GRID * rows, : GRID * columns]
    tiles = inner.reshape(count, channels, GRID, rows, GRID, columns).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(count, GRID * GRID, generator=generator).argsort(1).to(images.device)
    permuted = tiles.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order]
    together = permuted.reshape(count, GRID, GRID, *permuted.shape[2:]).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[..., : GRID * rows, : GRID * columns] = together.reshape(inner.shape)
    return result
