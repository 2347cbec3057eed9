"""Distillation steps straight from the papers' formulas, to compare with ours.

Plain loops and autograd, with the same dtype, batch and networks as ours and no deliberate
slowness.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def ntk(x: Tensor, z: Tensor, depth: int) -> Tensor:
    """Fully connected ReLU NTK of x (n, d) and z (m, d) by the arc-cosine recursion."""
    d = x.shape[-1]
    margin = 1e-12 if x.dtype == torch.float64 else 1e-6
    covariance = tangent = 2 * (x @ z.T) / d + 0.01
    left = 2 * x.square().sum(1, keepdim=True) / d + 0.01
    right = 2 * z.square().sum(1) / d + 0.01
    for _ in range(depth):
        norm = (left * right).sqrt()
        cosine = (covariance / norm).clamp(-1 + margin, 1 - margin)
        theta = torch.acos(cosine)
        slope = (math.pi - theta) / (2 * math.pi)
        covariance = 2 * norm * (theta.sin() / (2 * math.pi) + slope * cosine) + 0.01
        tangent = covariance + 2 * slope * tangent
        left, right = left + 0.01, right + 0.01
    return tangent


def kip_gradient(
    virtual: Tensor, virtual_targets: Tensor, real: Tensor, real_targets: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """HFLDD eq. 1, divided by the number of targets, and its gradient by autograd."""
    leaf = virtual.detach().requires_grad_()
    system = ntk(leaf, leaf, depth)
    ridge = 1e-6 * system.diagonal().mean() * torch.eye(len(leaf)).to(leaf)
    weights: Tensor = torch.linalg.solve(system + ridge, virtual_targets)
    residual = real_targets - ntk(real, leaf, depth) @ weights
    loss = 0.5 * residual.square().sum() / len(real)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def convnet(channels: int, width: int, blocks: int = 3) -> nn.Sequential:
    """The papers' ConvNet-3 with new He-normal filters, without its classifier."""
    layers: list[nn.Module] = []
    for inputs in [channels] + [width] * (blocks - 1):
        conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight)
        conv.weight.requires_grad_(False)
        layers += [conv, nn.InstanceNorm2d(width), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def dm_step(
    real: list[Tensor],
    virtual: list[Tensor],
    augment: Callable[[Tensor], Tensor],
    width: int,
    blocks: int = 3,
) -> list[Tensor]:
    """One step of distribution matching's algorithm 1: the pixel gradient of each class.

    `real` and `virtual` have one tensor (n, C, H, W) per class.
    """
    network = convnet(real[0].shape[1], width, blocks).to(real[0].device)
    leaves = [images.detach().requires_grad_() for images in virtual]
    loss = torch.zeros((), device=real[0].device)
    for own, leaf in zip(real, leaves, strict=True):
        with torch.no_grad():
            target = network(augment(own)).mean(0)
        loss = loss + (target - network(augment(leaf)).mean(0)).square().sum()
    return list(torch.autograd.grad(loss, leaves))


def gradient_step(
    images: Tensor, labels: Tensor, target: list[Tensor], model: nn.Module
) -> tuple[Tensor, Tensor]:
    """FedLGD eq. 5-6, a step of its server: the distance of two gradients, and its pixel gradient.

    One is that of the cross-entropy on all virtual images at once, the other the target, with a
    tensor for each parameter. As in the published code, those of one dimension do not count, and
    1e-6 is added to the product of two norms.
    """
    leaf = images.detach().requires_grad_()
    loss = functional.cross_entropy(model(leaf), labels)
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    distance = torch.zeros((), device=images.device)
    for own, other in zip(gradient, target, strict=True):
        if own.ndim > 1:
            nodes, others = own.flatten(1), other.flatten(1)
            norms = nodes.norm(dim=1) * others.norm(dim=1) + 1e-6
            distance = distance + (1 - (nodes * others).sum(1) / norms).sum()
    (by_pixels,) = torch.autograd.grad(distance, leaf)
    return distance.detach(), by_pixels
