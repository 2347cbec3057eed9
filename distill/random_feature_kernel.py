"""A kernel from the features of networks, after RFAD (Loo et al. 2022): random, or a user's own.

Averages the inner products of random networks' features to approximate the kernel of infinitely
wide ones. Its cost grows with m + n instead of m n: for images of 32x32 and larger.
"""

import math
from collections.abc import Callable, Sequence

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
    """Draw random networks and make their `feature_kernel`.

    Parameters
    ----------
    shape : tuple[int, int, int]
        (C, H, W), at least 4 pixels a side; the kernel takes images flattened to (..., n, C * H *
        W).
    seed : int (default: 0)
        Seed of the filters; the same on all nodes, so that they compare images alike.
    networks, width : int (default: 8, 64)
        Number of networks and their filters per block.
    """
    generator = torch.Generator().manual_seed(seed)
    convnets = [
        RandomConvNet.draw(shape[0], min(shape[1:]), width, generator, device)
        for _ in range(networks)
    ]
    return feature_kernel(shape, convnets)


def feature_kernel(
    shape: tuple[int, ...], networks: Sequence[Callable[[Tensor], Tensor]]
) -> Kernel:
    """The kernel of networks' features.

    K(x, z) = <phi(x), phi(z)> / |phi| + 0.01, with phi the concatenated features of all networks
    (Loo et al. 2022, eq. 5). The constant gives black images a kernel too. The pull-back uses
    autograd.

    Parameters
    ----------
    shape : tuple[int, int, int]
        (C, H, W); the kernel takes images flattened to (..., n, C * H * W).
    networks : Sequence[callable]
        From images (n, C, H, W) to features (n, features), differentiable by the images.
    """

    def features(points: Tensor) -> Tensor:
        images = points.reshape(-1, *shape)
        values = torch.cat([network(images) for network in networks], dim=1)
        return (values / math.sqrt(values.shape[1])).reshape(*points.shape[:-1], -1)

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
