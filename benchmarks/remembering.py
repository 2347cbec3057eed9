"""Nodes of several runs in one process distil the same samples once."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.many import distill_many

T = TypeVar("T")


@contextmanager
def distilling_once() -> Iterator[None]:
    """Within the block, nodes' first virtual data come from memory where they were made before.

    These depend on samples, settings and seed alone, and take most of the time of a short run.
    """
    with (
        patch("flwr_distill.strategies.hfldd.distillation.distill_many", remembered(distill_many)),
        patch("flwr_distill.client.virtual_data.distill_dm", remembered(distill_dm)),
    ):
        yield


@cache
def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which is called once for the same arguments and keeps all results.

    With a ``network`` it is called again each time: the result depends on the global model then.
    """
    results: dict[Hashable, T] = {}

    @wraps(function)
    def remembering(*args: Any, network: Any = None, **kwargs: Any) -> T:
        if network is not None:
            return function(*args, network=network, **kwargs)
        key = _key((args, kwargs))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return remembering


def _key(value: Any) -> Hashable:
    """What two values share if and only if they are equal."""
    match value:
        case Tensor():
            return value.dtype, value.shape, value.cpu().numpy().tobytes()
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case dict():
            return tuple((name, _key(value[name])) for name in sorted(value))
        case list() | tuple():
            return tuple(_key(item) for item in value)
        case Hashable():
            return value
    raise TypeError(f"cannot remember a result for {type(value).__name__}")
