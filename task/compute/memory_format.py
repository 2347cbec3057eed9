"""In which order convolutions on a CPU read the numbers of an image."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_fast_format(model: nn.Module) -> Iterator[torch.memory_format]:
    """Within the block, the model has the memory format in which it computes fastest.

    Yields the format, for batches (n, C, H, W). On a CPU, convolutions take channels last. The
    values are the same, but for rounding.
    """
    if not _is_faster_with_channels_last(model):
        yield torch.contiguous_format
        return
    _convert(model, torch.channels_last)
    try:
        yield torch.channels_last
    finally:  # safetensors and others read values as they lie in memory
        _convert(model, torch.contiguous_format)


def _convert(model: nn.Module, memory_format: torch.memory_format) -> None:
    for weight in model.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=memory_format)


def _is_faster_with_channels_last(model: nn.Module) -> bool:
    modules = list(model.modules())
    return (
        all(weight.device.type == "cpu" for weight in model.parameters())
        and any(isinstance(module, nn.Conv2d) for module in modules)
        and not any(_normalises_channels(module) for module in modules)
    )


def _normalises_channels(module: nn.Module) -> bool:
    """Whether it normalises single channels, which is much slower with channels last."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return isinstance(module, nn.InstanceNorm2d)
