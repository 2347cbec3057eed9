"""A kernel from the features of random convolutional networks, after RFAD (Loo et al. 2022).

An average over random networks of their features' inner products stands in for the kernel of
infinitely wide ones, at a cost that grows with m + n instead of m n: for images of 32x32 and up.
"""

import math

import torch
from torch import Tensor

from distill.features import RandomConvNet
from distill.kernels import BIAS_VARIANCE, Kernel, Pullback

NETWORKS = 8
WIDTH = 64


def random_feature_kernel(
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    networks: int = NETWORKS,
    width: int = WIDTH,
) -> Kernel:
    """Draw random networks and make their kernel.

    K(x, z) = <phi(x), phi(z)> / |phi| + 0.01, with phi the features of all networks side by side
    (Loo et al. 2022, eq. 5), and a constant one, so that black images too have a kernel. The
    pull-back goes through the networks by autograd.

    Parameters
    ----------
    shape : tuple[int, int, int]
        (C, H, W) of the images that come flattened; at least 4 pixels a side.
    device : torch.device or str (default: "cpu")
        Where the points will be.
    seed : int (default: 0)
        Of the filters: the same for all nodes, which thus compare images alike.
    networks : int (default: 8)
        How many.
    width : int (default: 64)
        Filters a block.

    Returns
    -------
    Kernel
        Of images flattened to (..., n, C * H * W).

    Raises
    ------
    DistillError
        If the images are too small.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        RandomConvNet.draw(shape[0], min(shape[1:]), width, generator, device)
        for _ in range(networks)
    ]

    def features(points: Tensor) -> Tensor:
        images = points.reshape(-1, *shape)
        found = torch.cat([network(images) for network in drawn], dim=1)
        return (found / math.sqrt(found.shape[1])).reshape(*points.shape[:-1], -1)

    def kernel(virtual: Tensor, real: Tensor | None = None) -> tuple[Tensor, Pullback]:
        leaf = virtual.detach().requires_grad_()
        with torch.enable_grad():
            own = features(leaf)
        others = own.detach() if real is None else features(real)

        def by_virtual(upstream: Tensor) -> Tensor:
            if real is None:  # each virtual point is on both sides of a symmetric K
                upstream = upstream + upstream.mT
            (gradient,) = torch.autograd.grad(own, leaf, upstream.mT @ others)
            return gradient

        return others @ own.detach().mT + BIAS_VARIANCE, by_virtual

    return kernel
