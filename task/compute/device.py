"""The device that a process computes on."""

import logging

import torch

from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError

logger = logging.getLogger("task")

SHARE_FOR_DATA = 0.5
"""Of a GPU's free memory; the rest is for models and activations."""


def choose_device(name: str, setting: str) -> torch.device:
    """Device of a name, after a trial computation; SettingsError if it fails.

    Parameters
    ----------
    name : str
        ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: the first GPU if it is usable, else the CPU.
    setting : str
        The setting with the name, for errors: ``server-device``.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if reason := _unusable(device := torch.device("cuda", 0)):
            logger.warning("%s = 'auto' takes the CPU: %s", setting, reason)
            return torch.device("cpu")
        return device
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(
            "is no device", where=setting, value=name, remedy="use auto, cpu, cuda or cuda:N"
        ) from None
    if reason := _unusable(device):
        raise SettingsError(reason, where=setting, value=name, remedy="try auto or cpu")
    return device


def describe_device(device: torch.device) -> str:
    """Name and memory of a device: ``cuda:0, NVIDIA H100, 79 GiB``."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def place(samples: Samples, device: torch.device) -> Samples:
    """The samples on a device; in main memory if they would fill over half of a GPU's free one.

    From there minibatches are copied when needed; see `Samples.minibatch`.
    """
    if device.type == "cuda":
        size = samples.inputs.nbytes + samples.labels.nbytes
        free, _ = torch.cuda.mem_get_info(device)
        if size > SHARE_FOR_DATA * free:
            text = "%.1f GiB of samples stay in main memory: %s has %.1f GiB free"
            logger.warning(text, size / 2**30, device, free / 2**30)
            return samples
    return samples.to(device)


def _unusable(device: torch.device) -> str:
    """Why nothing can be computed on a device; empty if it works."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "no CUDA device is there"
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            return f"this machine has {count} CUDA devices"
    try:
        torch.zeros(1, device=device).add_(1)
    except Exception as error:
        return f"it cannot be used: {error}"
    return ""
