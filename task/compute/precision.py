"""Precision of float32 computations, in one place.

PyTorch's own default on a GPU is a mix: matrix products in float32, convolutions in TF32.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from flwr_distill.task.settings import Precision


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within the block a GPU multiplies float32 tensors in this precision.

    With ``tf32``, products and convolutions keep 10 bits of mantissa, on GPUs that can (Ampere and
    later); otherwise all 23. The CPU and its results do not change.
    """
    # The older of PyTorch's two interfaces: its values can be read whichever was used to set them.
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = precision == "tf32"
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def forward_in(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Context for forward passes and losses: with ``bf16``, PyTorch's autocast to bfloat16.

    Weights and their gradients stay float32. Can be entered many times.
    """
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
