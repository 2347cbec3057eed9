"""Small data, distillers that take few steps, and an oracle of their kernel."""

import torch

from flwr_distill.distill import distiller


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def labelled(n=24, classes=3, seed=0):
    """Images of 8 x 8 pixels in classes that differ by their mean."""
    labels = torch.arange(n) % classes
    return normal(n, 1, 8, 8, seed=seed) + labels[:, None, None, None], labels


def distilled(method, images, labels, *, seed=5, **options):
    """Virtual data by a distiller, named or given."""
    method = distiller(method) if isinstance(method, str) else method
    few = {"num_classes": 4, "per_class": 2, "steps": 3}
    return method(images, labels, **{"generator": seeded(seed), **few, **options})


def naive_ntk(x, z, depth, same=False):
    """Arc-cosine recursion for autograd; a point with itself has the angle 0."""
    d = x.shape[-1]
    s = 2 * x @ z.T / d + 0.01
    p = 2 * x.square().sum(-1)[:, None] / d + 0.01
    r = 2 * z.square().sum(-1)[None, :] / d + 0.01
    itself = torch.eye(len(x), len(z), dtype=torch.bool) if same else torch.zeros(()).bool()
    t = s
    for _ in range(depth):
        n = (p * r).sqrt()
        theta = torch.where(itself, 0.0, torch.acos(torch.where(itself, 0.5, s / n)))
        s = 2 * n * (theta.sin() + (torch.pi - theta) * theta.cos()) / (2 * torch.pi) + 0.01
        t = s + 2 * (torch.pi - theta) / (2 * torch.pi) * t
        p, r = p + 0.01, r + 0.01
    return t
