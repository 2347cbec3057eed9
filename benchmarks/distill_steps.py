"""Steps of distillation, each in two ways: as the papers publish it, and ours.

Both get the same inputs. `benchmarks.distill` times them on a CPU, `benchmarks.gpu` on a GPU.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import distill_reference
from benchmarks.distill_cost import Step
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import Probe, real_means
from flwr_distill.distill.features import RandomConvNet
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import kip_gradient
from flwr_distill.distill.ntk import DEPTH
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.models import create_model

CLASSES = 10
KipProblem = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large the problems are.

    Parameters
    ----------
    side : int
        Pixels along each side of an image.
    per_class, real_per_class : int
        Virtual and real images of each of ten classes.
    width : int
        Filters of each block of distribution matching's networks.
    kip_points, kip_targets : int
        Virtual and real points of a large KIP step.
    """

    side: int = 32
    per_class: int = 10
    real_per_class: int = 256
    width: int = 128
    kip_points: int = 400
    kip_targets: int = 256


PAPERS = Sizes()
TINY = Sizes(side=8, per_class=2, real_per_class=8, width=8, kip_points=20, kip_targets=80)
"""To try the benchmarks within seconds."""


@dataclass(frozen=True)
class Setting:
    """Where to compute, and how large the problems are."""

    device: torch.device
    sizes: Sizes = PAPERS

    @property
    def spec(self) -> DataSpec:
        """Colour images of ten classes."""
        side = self.sizes.side
        return DataSpec("random", (3, side, side), CLASSES, (0.0,) * 3, (1.0,) * 3)

    def generator(self) -> torch.Generator:
        """Generator of a row's inputs."""
        return torch.Generator().manual_seed(0)

    def samples(self, n: int, spec: DataSpec | None = None) -> Samples:
        """Draw `n` images on the device, and labels in turn."""
        images = torch.randn(n, *(spec or self.spec).shape, generator=self.generator())
        return Samples(images.to(self.device), (torch.arange(n) % CLASSES).to(self.device))


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same step."""

    reference: Step
    ours: Step
    repeats: int


def kip_problem(
    shape: tuple[int, ...], targets: int, generator: torch.Generator, device: torch.device
) -> KipProblem:
    """Draw virtual points (..., n, d), `targets` real ones, and labels."""
    *batch, n, d = shape
    sizes = [(n, d), (n, CLASSES), (targets, d), (targets, CLASSES)]
    virtual, y_s, real, y_t = (
        torch.randn(*batch, *s, generator=generator).to(device) for s in sizes
    )
    return virtual, y_s, real, y_t


def in_float64(problem: KipProblem) -> KipProblem:
    """The same problem in double precision."""
    virtual, y_s, real, y_t = (x.double() for x in problem)
    return virtual, y_s, real, y_t


def kip_large(setting: Setting, dtype: torch.dtype) -> Comparison:
    """400 virtual and 256 real points of 3072 pixels, against the naive step in `dtype`."""
    sizes = setting.sizes
    shape = (sizes.kip_points, 3 * sizes.side**2)
    large = kip_problem(shape, sizes.kip_targets, setting.generator(), setting.device)
    naive = in_float64(large) if dtype == torch.float64 else large
    return Comparison(
        lambda: distill_reference.kip_gradient(*naive, depth=DEPTH),
        lambda: kip_gradient(*large),
        repeats=40,
    )


def kip_clients(setting: Setting) -> Comparison:
    """Ten clients of ten points in one batch, against one by one in float64."""
    shape = (10, 10, 3 * setting.sizes.side**2)
    clients = kip_problem(shape, 10, setting.generator(), setting.device)
    singles = [in_float64((a, b, c, d)) for a, b, c, d in zip(*clients, strict=True)]
    return Comparison(
        lambda: [distill_reference.kip_gradient(*one, depth=DEPTH) for one in singles],
        lambda: kip_gradient(*clients),
        repeats=200,
    )


def draw_probe(virtual: Tensor, width: int, generator: torch.Generator) -> Probe:
    """Draw a network and augmentation, with arbitrary class means."""
    channels, side, _ = virtual.shape[2:]
    network = RandomConvNet.draw(channels, side, width, generator, virtual.device)
    augment = draw_augmentation(side, side, generator).to(virtual.device)
    means = real_means(network, augment, virtual[:, 0], [1] * len(virtual))
    return Probe(network, augment, means)


def dm(setting: Setting) -> Comparison:
    """All ten classes; ours has a complete bank of five.

    The reference draws a network and processes the real images every step, as published.
    """
    sizes, generator = setting.sizes, setting.generator()
    shape = setting.spec.shape
    real = [
        torch.randn(sizes.real_per_class, *shape, generator=generator).to(setting.device)
        for _ in range(CLASSES)
    ]
    virtual = torch.randn(CLASSES, sizes.per_class, *shape, generator=generator).to(setting.device)
    bank = itertools.cycle([draw_probe(virtual, sizes.width, generator) for _ in range(5)])
    blocks = len(next(bank).network.filters)  # type: ignore[attr-defined]

    def reference() -> list[Tensor]:
        augment = draw_augmentation(sizes.side, sizes.side, generator).to(setting.device)
        return distill_reference.dm_step(real, list(virtual), augment, sizes.width, blocks)

    return Comparison(reference, lambda: next(bank).loss_and_gradient(virtual), repeats=10)


def gradient_matching(setting: Setting) -> Comparison:
    """FedLGD's server with ConvNet-3, all classes at once; ours also copies the model."""
    model = create_model("convnet3", setting.spec, seed=0).to(setting.device).eval()
    data = setting.samples(CLASSES * setting.sizes.per_class)
    generator = setting.generator()
    target = {
        name: torch.randn(weight.shape, generator=generator).to(setting.device)
        for name, weight in model.named_parameters()
    }
    gradients = list(target.values())
    return Comparison(
        lambda: distill_reference.gradient_step(data.inputs, data.labels, gradients, model),
        lambda: match_gradient(data.inputs, data.labels, target, model, steps=1),
        repeats=10,
    )


ROWS: dict[str, Callable[[Setting], Comparison]] = {
    "kip_n400_vs_float64": functools.partial(kip_large, dtype=torch.float64),
    "kip_n400_vs_float32": functools.partial(kip_large, dtype=torch.float32),
    "kip_batched_10x10": kip_clients,
    "dm_w128_float32": dm,
    "gradient_matching": gradient_matching,
}
