"""The benchmark compares like with like: reference steps compute what ours do."""

import torch

from benchmarks import distill_reference
from distill.augmentation import draw_augmentation
from distill.distribution_matching import Probe, real_means
from distill.features import RandomConvNet
from distill.kip import kip_gradient


def test_kip_reference_is_the_same_step() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(20, 30), (20, 4), (25, 30), (25, 4)]
    virtual, y_s, real, y_t = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes
    )
    loss, gradient = kip_gradient(virtual, y_s, real, y_t)
    reference_loss, reference = distill_reference.kip_gradient(virtual, y_s, real, y_t, depth=3)
    torch.testing.assert_close(loss, reference_loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-6)


def test_dm_reference_is_the_same_step() -> None:
    generator = torch.Generator().manual_seed(0)
    real = [torch.randn(n, 3, 16, 16, generator=generator) for n in (5, 3)]
    virtual = torch.randn(2, 4, 3, 16, 16, generator=generator)
    augment = draw_augmentation(16, 16, generator)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        reference = distill_reference.dm_step(real, list(virtual), augment, width=8)
        torch.manual_seed(1)
        modules = distill_reference.convnet(3, 8)
    filters = tuple(m.weight for m in modules if isinstance(m, torch.nn.Conv2d))
    network = RandomConvNet(filters)
    means = real_means(network, augment, torch.cat(real), [len(x) for x in real])
    _, gradient = Probe(network, augment, means).loss_and_gradient(virtual)
    torch.testing.assert_close(gradient, torch.stack(reference), rtol=1e-4, atol=1e-5)
