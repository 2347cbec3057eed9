"""Cost of a step: time, peak memory, operations and bytes, and what the device can do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Step = Callable[[], object]


def seconds(step: Step, device: torch.device) -> float:
    """Wall-clock time of one call, synchronised with the device."""
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def peak_bytes(step: Step, device: torch.device) -> int:
    """Peak memory of one call (after a warm-up), minus the memory before it.

    On a GPU from torch's allocator; else the growth of the resident set, on Linux. There, call it
    in a separate process with `MALLOC_MMAP_THRESHOLD_=65536`, so that the C library returns freed
    memory.
    """
    step()
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def count(step: Step) -> tuple[int, int]:
    """Count one call's operations and bytes.

    Floating-point operations of matrix products and convolutions, two per multiply-add. Bytes are
    those read and written by all tensor operations except views, an upper bound because of caches.
    """
    with _Counter() as counter:
        step()
    return counter.operations, counter.bytes


def peak_rates(device: torch.device) -> tuple[float, float]:
    """Measure FLOP/s of a large matrix product and bytes/s of a large copy.

    float32 products use TF32 if available, as convolutions do.
    """
    n, repeats = (8192, 10) if device.type == "cuda" else (2048, 3)
    a = torch.randn(n, n, device=device)
    large = torch.empty(n * n * 4, device=device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        product = min(seconds(lambda: a @ a, device) for _ in range(repeats))
    finally:
        torch.set_float32_matmul_precision(precision)
    other = torch.empty_like(large)
    copy = min(seconds(lambda: other.copy_(large), device) for _ in range(repeats))
    return 2 * n**3 / product, 2 * large.nbytes / copy


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts as PyTorch's FlopCounterMode, whose hooks on modules forbid some second gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):  # in inference mode it was not taken apart before
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.operations += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        if not func.is_view:
            touched = (x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
            self.bytes += sum(x.nbytes for x in touched)
        return out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory needs Linux")
