"""CUDA graphs: a step's kernels are recorded once, and then started all at once."""

import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

logger = logging.getLogger("task")

P = ParamSpec("P")
R = TypeVar("R")


def graphed(step: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Return a function that does what `step` does, with fewer calls to a GPU's driver.

    Without a GPU this is `step` itself. On one, the first call with arguments of some form runs
    `step` itself, the second records its kernels, and from then on these are started at once. The
    form is the shapes and types of tensors (also in tuples, lists and dataclasses), and the values
    of other arguments. A `step` that cannot be recorded always runs itself.

    Results of a recorded step are overwritten by its next call, so use them before. Python code in
    `step` runs in the first two calls only: it must neither draw random numbers nor wait for the
    GPU, and tensors that are not arguments must keep their memory. Arguments are positional.
    """
    if device.type != "cuda":
        return step
    try:
        return cast(Callable[P, R], _Graphed(step, _stream(device, threading.get_ident())))
    except RuntimeError as error:  # no driver, or no CUDA in this PyTorch
        logger.info("no CUDA graphs: %s", error)
        return step


@cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Where a thread records: cuBLAS keeps up to 64 MB for each stream that it has been used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Graphed:
    """Recordings of a step by the form of its arguments."""

    def __init__(self, step: Callable[..., Any], stream: torch.cuda.Stream) -> None:
        self._step = step
        self._stream = stream
        self._memory = torch.cuda.graph_pool_handle()
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._can_record = True

    def __call__(self, *arguments: Any) -> Any:
        if not self._can_record:
            return self._step(*arguments)
        tensors: list[Tensor] = []
        form = _form(arguments, tensors)
        if form not in self._recordings:
            self._recordings[form] = None
            # On the stream of the recording, which autograd's nodes remember.
            return _beside(self._stream, lambda: self._step(*arguments))
        recording = self._recordings[form] or self._recorded(arguments)
        self._recordings[form] = recording
        if recording is None:  # outside of any handler: the step's errors have no other context
            return self._step(*arguments)
        return recording.replay(tensors)

    def _recorded(self, arguments: tuple[Any, ...]) -> "_Recording | None":
        try:
            return _Recording(self._step, arguments, self._stream, self._memory)
        except RuntimeError as error:
            logger.info("a step cannot be recorded as a CUDA graph: %s", error)
            self._can_record = False
            _end_recording(self._stream, self._memory, arguments)
            return None


def _end_recording(stream: torch.cuda.Stream, memory: Any, arguments: tuple[Any, ...]) -> None:
    """Leave PyTorch as it was before a recording that has failed.

    PyTorch 2.11 then keeps freed memory, as if the recording could still need it, and its generator
    draws no random numbers before another recording has succeeded.
    """
    with suppress(RuntimeError):  # the recording had not started, or PyTorch has ended it
        torch._C._cuda_endAllocateToPool(stream.device.index, memory)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        _copied(arguments)


class _Recording:
    """A recorded step, with its arguments' and results' places in memory."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        stream: torch.cuda.Stream,
        memory: Any,
    ) -> None:
        own = _copied(arguments)
        self._inputs: list[Tensor] = []
        _form(own, self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may continue using the GPU. Of a recording that fails, PyTorch leaves its
        # stream as the current one: the outer context returns to the stream of before.
        with (
            torch.cuda.stream(torch.cuda.current_stream(stream.device)),
            torch.cuda.graph(
                self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            self._results = step(*own)

    @torch.no_grad()
    def replay(self, tensors: list[Tensor]) -> Any:
        torch._foreach_copy_(self._inputs, tensors)
        self._graph.replay()
        return self._results


def _beside(stream: torch.cuda.Stream, work: Callable[[], Any]) -> Any:
    """Do some work on another stream, between what this one did before and does after."""
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        result = work()
    here.wait_stream(stream)
    return result


def _form(value: Any, tensors: list[Tensor]) -> Hashable:
    """Add the tensors in `value` to a list; return all else that there is to know of it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return type(value), *(_form(part, tensors) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in fields(value))
        return type(value), *(_form(part, tensors) for part in parts)
    return cast(Hashable, value)


def _copied(value: Any) -> Any:
    """Copy `value` with its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _copied(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **parts)
    return value
