"""What this machine's GPUs are, why one is unusable, and what CUDA's errors mean for a process.

Functions import PyTorch: the executor, which has none, imports this too.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator

_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Of a CUDA version, from NVIDIA's "Minor Version Compatibility" (CUDA Compatibility guide)."""


def describe_gpu(number: int) -> str:
    """Name and memory of a GPU: ``NVIDIA H100 80GB HBM3, 79.2 GiB``."""
    import torch

    properties = torch.cuda.get_device_properties(number)
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"


def why_unusable(number: int) -> str:
    """Compute something on a GPU, this process's from now on; return why not, or ''.

    NVML, which counts GPUs, also counts those that are too old for this PyTorch or driver.
    """
    import torch

    try:
        torch.cuda.set_device(number)
        torch.ones(2, device=f"cuda:{number}").sum().item()
    except Exception as error:  # PyTorch raises several kinds, without a common class
        reason = str(error).strip().partition("\n")[0]
        return f"CUDA cannot use {_known_of(number)}: {reason} ({pytorch_needs()})"
    return ""


def oldest_driver() -> int | None:
    """Oldest driver, by its major version, that this PyTorch works with; None if it needs none."""
    import torch

    version = torch.version.cuda
    return None if version is None else _OLDEST_DRIVERS.get(int(version.partition(".")[0]))


def pytorch_needs() -> str:
    """What this PyTorch needs of driver and GPU, as far as it says."""
    import torch

    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    needs = f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if driver := oldest_driver():
        needs += f", needs driver {driver} or later"
    if kinds := torch.cuda.get_arch_list():  # empty where the driver is at fault
        needs += f", and has code for {' '.join(kinds)}"
    return needs


def is_cuda_lost(error: BaseException) -> bool:
    """Whether CUDA failed below an error, after which it fails for good in this process."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    if any(isinstance(each, torch.AcceleratorError) for each in _causes(error)):
        return True
    if torch.cuda.is_initialized():
        try:  # cuBLAS and cuDNN report a kernel's failure as errors of their own
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice, below any other error."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    return any(
        isinstance(each, torch.OutOfMemoryError)
        # what is allocated past PyTorch's allocator, for instance for handles of libraries
        or (isinstance(each, torch.AcceleratorError) and "out of memory" in str(each))
        or (isinstance(each, RuntimeError) and "_STATUS_ALLOC_FAILED" in str(each))
        for each in _causes(error)
    )


def memory_remedy(device: str, batch_size: object) -> str:
    """What to do after `is_out_of_memory`; `batch_size` is the run's, None if unknown."""
    kind, _, number = device.partition(":")
    place = f"{device} ({describe_gpu(int(number))})" if kind == "cuda" else "the GPU"
    batches = "the batch size" if batch_size is None else f"train.batch-size={batch_size}"
    return (
        f"{place} is out of memory: lower {batches}, take a smaller model or fewer virtual images, "
        "or start fewer nodes on this GPU"
    )


def give_memory_back(error: BaseException) -> None:
    """Free what the frames of an error keep, and PyTorch's cache on the GPU."""
    import torch

    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    torch.cuda.empty_cache()


def _known_of(number: int) -> str:
    import torch

    try:
        major, minor = torch.cuda.get_device_capability(number)
        return f"this GPU, {describe_gpu(number)}, sm_{major}{minor}"
    except Exception:  # the driver itself is at fault, and says nothing of its GPUs
        return "this machine's GPUs"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
