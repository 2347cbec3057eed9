"""A GPU that is not there: run code for CUDA on the CPU, and learn where it would break or wait.

::

    with VirtualDevice() as gpu:
        model.to("cuda")                         # code as it is, values as on the CPU
        with gpu.measured() as used:
            train(model)
    assert used.waits == 0, used.lines("wait")

Tensors on it hold their values on the CPU, so that control flow that depends on data, autograd
(also twice), `torch.func`, hooks and optimisers work as usual. What CUDA refuses raises the error
that PyTorch raises there: tensors of several devices in one operation, a draw from a generator of
another device, `.numpy()`, a device beyond the last. Kernel launches, copies and waits are counted,
with the line of this project that asked for them.

It cannot tell: numbers that differ on a GPU (TF32, autocast, atomics, other algorithms), memory,
pinned or not, streams and graphs, what CUDA cannot compute, and what C++ decides by the device,
because C++ sees "meta" (cuDNN's LSTM, for instance, counts as the steps of PyTorch's own). Tensors
that C++ makes beside others are on the GPU that was used last. A module's parameters are new
objects after a move between CPU and GPU, so an optimiser must be made after it. It relies on
private functions of PyTorch, one of which PyTorch 2.8 does not have: see `unsupported`.
"""

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar, Literal, Self, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cuda_rules import (
    COPIES,
    CPU_LENGTHS,
    copies_from_cpu,
    kernels,
    takes_from_cpu,
    waits,
)
from flwr_distill.node import compiler

ROOT = str(Path(__file__).resolve().parents[1])
IN_BETWEEN = {__file__, compiler.__file__}
"""Files that stand between a line of the project and PyTorch."""
CPU, META = torch.device("cpu"), torch.device("meta")
MEMORY = 80 * 2**30
Kind = Literal["launch", "wait", "copy"]
"""A kernel is started; the host waits; values go from the host to a GPU or back."""

aten = torch.ops.aten
_Generator = torch.Generator
_apply: Callable[..., nn.Module] = nn.Module._apply


def unsupported() -> str:
    """Describe why this PyTorch cannot have a virtual GPU; empty if it can."""
    guard = "_ensureCUDADeviceGuardSet"
    if hasattr(torch._C, guard):
        return ""
    return (
        f"PyTorch {torch.__version__} has no torch._C.{guard}: without a driver, autograd and "
        "autocast ask CUDA for a tensor's device (a virtual GPU needs a newer PyTorch)"
    )


class Account:
    """How often code launched, waited and copied, and where."""

    def __init__(self) -> None:
        self._events: Counter[tuple[Kind, str, str]] = Counter()

    def add(self, kind: Kind, operation: str, count: int = 1) -> None:
        """Count what an operation of PyTorch asked for, with the line that called it."""
        self._events[kind, operation, _line()] += count

    @property
    def launches(self) -> int:
        """Kernels started."""
        return sum(count for _, count in self.lines("launch"))

    @property
    def waits(self) -> int:
        """How often the host waited."""
        return sum(count for _, count in self.lines("wait"))

    @property
    def copies(self) -> int:
        """Copies between host and GPU."""
        return sum(count for _, count in self.lines("copy"))

    def __sub__(self, other: "Account") -> "Account":
        difference = Account()
        difference._events = Counter(self._events)
        difference._events.subtract(other._events)
        return difference

    def lines(self, kind: Kind) -> list[tuple[str, int]]:
        """Events of a kind by line of the project, "file:line", most first."""
        return self._by(2, kind)

    def operations(self, kind: Kind) -> list[tuple[str, int]]:
        """Events of a kind by operation of PyTorch, most first."""
        return self._by(1, kind)

    def _by(self, place: int, kind: Kind) -> list[tuple[str, int]]:
        sums: Counter[str] = Counter()
        for event, count in self._events.items():
            if event[0] == kind:
                sums[event[place]] += count
        return sums.most_common()


class VirtualDevice:
    """Pretends that there are GPUs, within a `with` block.

    Parameters
    ----------
    count : int (default: 1)
        GPUs.

    Attributes
    ----------
    used : set[torch.device]
        Those that anything was put on.

    Raises
    ------
    RuntimeError
        At the start of the block, if this PyTorch cannot have one (`unsupported`).
    """

    current: ClassVar["VirtualDevice | None"] = None

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.used: set[torch.device] = set()
        self._mode = _EveryOperation(self)
        self._patches = contextlib.ExitStack()
        self._accounts: list[Account] = []
        self._used_last = torch.device("cuda", 0)
        self._generators: dict[int, torch.Generator] = {}
        """By address: an operation gets another Python object for the same generator."""

    def __enter__(self) -> Self:
        if reason := unsupported():
            raise RuntimeError(reason)
        torch._C._ensureCUDADeviceGuardSet()
        patch = self._patches.enter_context
        patch(mock.patch.object(VirtualDevice, "current", self))
        for name, value in self._of_torch_cuda().items():
            patch(mock.patch.object(torch.cuda, name, value))
        patch(mock.patch.object(torch, "Generator", _generator_class(self)))
        patch(mock.patch.object(nn.Module, "_apply", _apply_as_on_cuda))
        patch(mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=False))
        foreach = [*optimizer._foreach_supported_types, VirtualTensor]
        patch(mock.patch.object(optimizer, "_foreach_supported_types", foreach))
        # torch.tensor(..., device="cuda") first makes a CPU tensor, as without a mode.
        self._patches.callback(
            torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors()
        )
        torch._C._set_only_lift_cpu_tensors(True)
        patch(self._mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    @contextlib.contextmanager
    def measured(self) -> Iterator[Account]:
        """Count what a block asks for."""
        account = Account()
        self._accounts.append(account)
        try:
            yield account
        finally:
            self._accounts.remove(account)

    def _count(self, kind: Kind, operation: str, count: int = 1) -> None:
        for account in self._accounts:
            account.add(kind, operation, count)

    def _of_torch_cuda(self) -> dict[str, Callable[..., Any]]:
        about = SimpleNamespace(
            name="virtual GPU", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
        )
        return {
            "_lazy_init": lambda: None,
            "current_device": lambda: 0,
            "device_count": lambda: self.count,
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: (about.major, about.minor),
            "get_device_name": lambda device=None: about.name,
            "get_device_properties": lambda device=None: about,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "max_memory_allocated": lambda device=None: 0,
            "mem_get_info": lambda device=None: (MEMORY, MEMORY),
            "memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "set_device": lambda device: None,
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "synchronize": lambda device=None: self._count("wait", "synchronize"),
        }

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the CPU as if on the devices that its tensors say they are on."""
        leaves = list(_leaves((args, kwargs)))
        if not any(isinstance(x, VirtualTensor) for x in leaves) and not _is_gpu(kwargs):
            self._check_generators(func, leaves, CPU)
            if func.overloadpacket is aten.is_pinned:  # pinned memory needs a driver
                return False
            return (aten.clone if func.overloadpacket is aten._pin_memory else func)(
                *args, **kwargs
            )
        if func.overloadpacket is aten._local_scalar_dense:
            self._transfer(str(func.overloadpacket), waits=True)
            return func(args[0].held)
        if _is_composite(func):  # in inference mode it was not taken apart before
            with self._mode:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func.overloadpacket in COPIES:
            place, moved = self._copied(func, args, kwargs)
        else:
            place, moved = self._place(func, args, kwargs, leaves), False
        if place.type == "cuda":
            if place.index >= self.count:
                raise RuntimeError(f"CUDA error: invalid device ordinal ({place})")
            self._used_last = place
            self.used.add(place)
            if not moved and (number := kernels(func, args)):
                self._count("launch", str(func.overloadpacket), number)
        self._check_generators(func, leaves, place)
        return _computed(func, args, kwargs, place)

    def _place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> torch.device:
        """Where the result of an operation goes that is not a copy."""
        packet = func.overloadpacket
        places = list(dict.fromkeys(x.place for x in leaves if isinstance(x, VirtualTensor)))
        for x in leaves:
            if _is_on_cpu(x):
                if not takes_from_cpu(func, args, x):
                    places.append(CPU)
                elif copies_from_cpu(packet, args, x):
                    self._transfer(str(packet), waits=True)
        if len(set(places)) > 1:
            found = " and ".join(sorted({str(place) for place in places}))
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found}! (in {func}, at {_line()})"
            )
        if waits(packet, args, kwargs):
            self._count("wait", str(packet))
        return places[0] if places else self._asked(kwargs["device"])

    def _copied(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.device, bool]:
        """Where a copy goes, and whether it comes from another device."""
        packet = func.overloadpacket
        if packet is aten._to_copy:
            here = _place_of(args[0])
            there = here if kwargs.get("device") is None else self._asked(kwargs["device"])
            ways = [(here, there)]
            unblocked = bool(kwargs.get("non_blocking"))
        else:  # copy_(target, source, non_blocking), or lists of these
            targets, sources = ([x] if isinstance(x, Tensor) else x for x in args[:2])
            ways = [
                (_place_of(source), _place_of(target))
                for target, source in zip(targets, sources, strict=True)
            ]
            there = ways[0][1]
            # into memory of the host that is not pinned, as is that of other targets here
            unblocked = len(args) > 2 and args[2] and there != CPU
        for origin, target in ways:
            if origin != target and CPU in (origin, target):
                self._transfer(str(packet), waits=not unblocked)
        return there, any(origin != target for origin, target in ways)

    def _transfer(self, operation: str, waits: bool) -> None:
        self._count("copy", operation)
        if waits:
            self._count("wait", operation)

    def _asked(self, device: torch.device | str) -> torch.device:
        asked = torch.device(device)
        # C++ asks for the device that it sees a virtual tensor on.
        return self._used_last if asked.type == "meta" else _with_index(asked)

    def _check_generators(self, func: Any, leaves: list[Any], place: torch.device) -> None:
        for x in leaves:
            if isinstance(x, _Generator):
                found = "cuda" if cast(Any, x)._cdata in self._generators else "cpu"
                if found != place.type:
                    raise RuntimeError(
                        f"Expected a '{place.type}' device type for generator but found '{found}' "
                        f"(in {func}, at {_line()})"
                    )


class VirtualTensor(Tensor):
    """A tensor that says it is on a GPU, `place`, and has its values on the CPU, in `held`."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> "VirtualTensor":
        """Make a tensor that C++ takes for one on "meta", of the same shape."""
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=META,
        )
        made.held, made.place = held, place
        return cast(VirtualTensor, made)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if VirtualDevice.current is None:
            raise RuntimeError("a virtual tensor outside of any VirtualDevice")
        return VirtualDevice.current.run(func, args, kwargs or {})

    device = property(lambda self: self.place)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @property
    def data(self) -> Tensor:
        """The values, without a history."""
        return self.detach()

    @data.setter
    def data(self, new: Any) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.held, self.place = new.held, new.place

    def get_device(self) -> int:
        """Index of the GPU."""
        return self.place.index

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as CUDA does, unless forced."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.place} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """Return the tensor itself where nothing changes; C++ would see another device."""
        other = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if other is None:
            device, dtype, unblocked, layout = torch._C._nn._parse_to(*args, **kwargs)
        else:
            device, dtype, unblocked, layout = other.device, other.dtype, False, None
        device = self.place if device is None else _with_index(device)
        dtype = dtype or self.dtype
        if (device, dtype, layout) == (self.place, self.dtype, None) and not copy:
            return self
        memory_format = {} if layout is None else {"memory_format": layout}
        return super().to(device, dtype, unblocked, copy, **memory_format)

    def cuda(  # type: ignore[override]
        self, device: Any = None, non_blocking: bool = False
    ) -> Tensor:
        """Return the tensor on a GPU."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):  # a CPU tensor for CUDA, but one on "meta" for "meta"
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(_with_tensors(index), value)

    def tolist(self) -> Any:
        """Values as Python's numbers, which waits."""
        return self.detach().cpu().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VirtualTensor({self.held!r}, device={self.place})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "VirtualTensor":
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support deepcopy")
        if id(self) not in memo:
            memo[id(self)] = new = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                new._is_param = True
            if self.grad is not None:
                new.grad = copy.deepcopy(self.grad, memo)
        return cast(VirtualTensor, memo[id(self)])


class _EveryOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leads operations without virtual tensors to the device too, such as those that make one."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.run(func, args, kwargs or {})


def _generator_class(gpus: VirtualDevice) -> type:
    """Make what stands for torch.Generator; generators of a GPU draw as those of the CPU."""

    class OnGpu(_Generator):
        device = property(lambda self: self.place)

        def set_offset(self, offset: int) -> None:  # type: ignore[override]
            if offset % 4:
                raise RuntimeError("offset must be a multiple of 4")
            self.manual_seed((self.initial_seed() + offset) % 2**64)

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _Generator)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            place = _with_index(device)
            if place == CPU:
                return _Generator()
            made: Any = OnGpu()
            made.place = place
            gpus._generators[made._cdata] = made
            return made

    return Generator


def _apply_as_on_cuda(
    module: nn.Module, move: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Move a module as between real devices within inference mode.

    Its parameters can be changed later; its buffers become inference tensors, which cannot. Tensors
    of a subclass would go another way.
    """

    def moved(x: Tensor) -> Tensor:
        with torch.inference_mode(not isinstance(x, nn.Parameter)):
            return move(x)

    return _apply(module, moved if torch.is_inference_mode_enabled() else move, recurse)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device) -> Any:
    """Run an operation on the values; what it gives is on `place`, or an argument itself."""
    known: dict[int, Tensor] = {}

    def on_cpu(x: Any) -> Any:
        if isinstance(x, torch.device):
            return CPU
        if not isinstance(x, Tensor):
            return x
        values = x.held if isinstance(x, VirtualTensor) else x
        known[id(values)] = x
        return values

    def on_place(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in known:
            return known.get(id(x), x)
        if place == CPU:
            return x
        if torch.is_inference_mode_enabled() and not x.is_inference():  # a view of a normal tensor
            with torch.inference_mode(False):
                return VirtualTensor(x, place)
        return VirtualTensor(x, place)

    real_args, real_kwargs = _mapped(on_cpu, (args, kwargs))
    real_kwargs.pop("pin_memory", None)
    real_kwargs.pop("non_blocking", None)
    result = func(*real_args, **real_kwargs)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], VirtualTensor):
        with no_dispatch():  # what C++ sees gets the new shape too
            func(*args, **kwargs)
    if func.overloadpacket in CPU_LENGTHS and isinstance(result, tuple):
        return (on_place(result[0]), *result[1:])
    return _mapped(on_place, result)


def _leaves(x: Any) -> Iterator[Any]:
    """What is in the arguments of an operation; PyTorch's own function takes four times as long."""
    if isinstance(x, list | tuple):
        for part in x:
            yield from _leaves(part)
    elif isinstance(x, dict):
        yield from _leaves(list(x.values()))
    else:
        yield x


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)([_mapped(function, part) for part in x])
    if isinstance(x, dict):
        return {key: _mapped(function, part) for key, part in x.items()}
    return function(x)


def _is_on_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, VirtualTensor)


def _is_gpu(kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("device")
    return asked is not None and torch.device(asked).type in ("cuda", "meta")


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _place_of(x: Tensor) -> torch.device:
    return x.place if isinstance(x, VirtualTensor) else CPU


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type in ("cuda", "meta") else device


def _with_tensors(index: Any) -> Any:
    """An index with CPU tensors for lists, which C++ would make on "meta", without values."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(part) for part in index)
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.int64)
    return index


def _line() -> str:
    """The innermost line of this project that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "site-packages" not in file and file not in IN_BETWEEN:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
