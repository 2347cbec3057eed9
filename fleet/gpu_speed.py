"""Times three typical computations of a node on a GPU, with the least time its hardware allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from flwr_distill.distill.kip import kip_gradient
from flwr_distill.task.compute.precision import products_in

SECONDS = 2.0
MATRIX = 4096
IMAGES, CHANNELS, SIDE = 256, 64, 32
VIRTUAL, REAL, PIXELS, CLASSES = 400, 256, 3 * 32 * 32, 10
"""Sizes: of a product of two matrices, a 3x3 convolution, a step of KIP."""

PEAKS = {"NVIDIA H100 80GB HBM3": (67e12, 3.35e12)}
"""Float32 operations and bytes a second by a GPU's name, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a piece of work, and its floor: the least possible, None if not known."""

    name: str
    seconds: float
    floor: float | None

    def __str__(self) -> str:
        floor = "" if self.floor is None else f" (floor {1e3 * self.floor:.3g})"
        return f"{self.name} {1e3 * self.seconds:.3g} ms{floor}"


def time_gpu(device: torch.device) -> list[Timing]:
    """Time a matrix product, a convolution and a step of KIP, in float32, for 2 seconds in all.

    The floor is the larger time of the operations, and of the bytes of arguments and results, each
    at its peak. Raises ArithmeticError if a result is not finite.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def targets(count: int) -> Tensor:
        return torch.eye(CLASSES, device=device).repeat(-(-count // CLASSES), 1)[:count]

    peaks = PEAKS.get(torch.cuda.get_device_name(device))
    pieces: list[tuple[str, Callable[[], Tensor], list[Tensor]]] = []
    a, b = draw(MATRIX, MATRIX), draw(MATRIX, MATRIX)
    pieces.append(("matmul", lambda: a @ b, [a, b]))
    images, weights = draw(IMAGES, CHANNELS, SIDE, SIDE), draw(CHANNELS, CHANNELS, 3, 3)
    pieces.append(
        ("conv", lambda: functional.conv2d(images, weights, padding=1), [images, weights])
    )
    problem = [draw(VIRTUAL, PIXELS), targets(VIRTUAL), draw(REAL, PIXELS), targets(REAL)]
    pieces.append(("KIP step", lambda: kip_gradient(*problem).by_virtual, problem))
    with products_in("float32"):
        return [
            _timed(name, work, arguments, device, SECONDS / len(pieces), peaks)
            for name, work, arguments in pieces
        ]


def _timed(
    name: str,
    work: Callable[[], Tensor],
    arguments: list[Tensor],
    device: torch.device,
    seconds: float,
    peaks: tuple[float, float] | None,
) -> Timing:
    with FlopCounterMode(display=False) as counter:
        result = work()
    if not torch.isfinite(result).all():
        raise ArithmeticError(f"{name}: the result is not finite")
    floor = None
    if peaks is not None:
        size = sum(x.nbytes for x in (*arguments, result))
        floor = max(counter.get_total_flops() / peaks[0], size / peaks[1])
    work()  # warm up: preparations do not count
    torch.cuda.synchronize(device)
    runs, began, spent = 0, time.perf_counter(), 0.0
    while spent < seconds:
        work()
        torch.cuda.synchronize(device)
        runs, spent = runs + 1, time.perf_counter() - began
    return Timing(name, spent / runs, floor)
