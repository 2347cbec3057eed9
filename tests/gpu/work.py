"""Small work for GPUs, virtual and real, and how near its results must be to the CPU's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.virtual_device import VirtualDevice
from flwr_distill.task.datasets import Samples, load_dataset
from tests.distill.builders import seeded as generator

GPU = "cuda:1"
"""The second virtual GPU: what goes to the first by default is then found."""
REAL_GPU = "cuda:0"
SPEC = load_dataset("digits").spec

# Largest share of a result by which a real GPU may differ from the CPU. Both compute in float32,
# but a GPU adds in another order, with atomics in another one each time.
ONE_PASS = 1e-4
"""One way through a model. Each sum is wrong by up to 1e-6 of its terms, which may cancel out."""
SGD = 1e-3
"""Some steps of SGD: each starts from the error of the one before."""
ADAM = 0.05
"""Some steps of Adam, which takes only the sign of a small gradient: rounding may turn it."""
ACCURACY = 0.05
"""Of a federation after its rounds: 18 of the 360 digits in the test set."""


@dataclass(frozen=True)
class Place:
    """A GPU under test: the second of two virtual ones, or a real one.

    A virtual GPU computes on the CPU, so its results must equal the CPU's to the last digit.
    """

    device: str
    virtual: VirtualDevice | None = None

    def check(self, found, wanted, tolerance, start=None):
        """Check that results are those of the CPU, or on a real GPU within a tolerance.

        Parameters
        ----------
        found, wanted : Tensor, number, None, or tuples, lists and dicts of them
            From this place and from the CPU.
        tolerance : float
            Share of a number; of tensors, mean difference as a share of the mean size.
        start : like `wanted`, optional
            Where the work began. The tolerance is then a share of the way from there.
        """
        if isinstance(wanted, dict):
            assert found.keys() == wanted.keys()
            for key in wanted:
                self.check(found[key], wanted[key], tolerance, start and start[key])
        elif isinstance(wanted, list | tuple):
            for one, other in zip(found, wanted, strict=True):
                self.check(one, other, tolerance)
        elif not isinstance(wanted, Tensor):
            self._check_number(found, wanted, tolerance)
        elif self.virtual or not wanted.is_floating_point():
            assert torch.equal(found.cpu(), wanted)
        else:
            way = wanted if start is None else wanted - start.cpu()
            difference, size = (x.double().abs().sum() for x in (found.cpu() - wanted, way))
            assert difference <= tolerance * size, f"differs by {difference / size:.2g}"

    def check_used(self):
        """Check that nothing was put on another GPU; only virtual ones know."""
        if self.virtual:
            assert self.virtual.used == {torch.device(self.device)}

    def _check_number(self, found, wanted, tolerance):
        if self.virtual or not isinstance(wanted, float):
            assert found == wanted
        else:
            difference = abs(found - wanted) / max(abs(wanted), 1e-3)
            assert difference <= tolerance, f"{found} differs from {wanted} by {difference:.2g}"


def samples(n, side=8):
    images = torch.randn(n, 1, side, side, generator=generator())
    return Samples(images, torch.arange(n) % 10)
