"""The `Distiller` interface, and distillers by name."""

from collections.abc import Callable
from inspect import signature
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.plugin import PluginError, import_object, plugged_in

Progress = Callable[[int, int, float], None]


class Distiller(Protocol):
    """A method that condenses labelled images into a few virtual ones.

    Bind a method's extra keyword arguments with `functools.partial`.
    """

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        per_class: int,
        init: str = "class-stats",
        steps: int | None = None,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        formation: int = 1,
    ) -> VirtualData:
        """Distil `images` into `per_class` virtual images of each class present.

        Parameters
        ----------
        images, labels : Tensor
            float32 (n, C, H, W), normalised; int64 (n,), in [0, num_classes).
        num_classes : int
            Classes of the task, present here or not.
        per_class : int
            Virtual images of each class present, even if it has fewer real ones.
        init : str (default: "class-stats")
            Name of the start, see `distill.starts`.
        steps : int, optional (default: None)
            None means the method's default.
        generator : torch.Generator
            Source of all random draws, on the CPU; the same state gives the same result.
        device : torch.device or str (default: "cpu")
            Where to compute; the result is on the CPU.
        progress : callable, optional (default: None)
            Called after each step with (steps done, all steps, loss).
        formation : int (default: 1)
            Smaller images along each side of an image, see `distill.formation`; 0 lets the method
            choose. A method without this argument makes one image of each.

        Returns
        -------
        VirtualData
            Sorted by class.

        Raises
        ------
        DistillError
            If an argument is unusable.
        """
        ...


D = TypeVar("D", bound=Distiller)
_DISTILLERS: dict[str, Distiller] = {}
_CAUTIONS: dict[str, str] = {}


def register(name: str, *, caution: str = "") -> Callable[[D], D]:
    """Decorate a distiller to register it; `caution` is what attacks found in its data."""

    def add(method: D) -> D:
        _DISTILLERS[name] = method
        _CAUTIONS[name] = caution
        return method

    return add


def caution_of(method: str) -> str:
    """What attacks have found in virtual data of a method; empty if nothing is known."""
    return _CAUTIONS.get(method, "")


def distiller_names() -> list[str]:
    """Names that `distiller` knows without plug-ins."""
    return sorted(_DISTILLERS)


def distiller(name: str) -> Distiller:
    """Distiller of a registered name, of an installed plug-in, or as ``package.module:function``.

    Raises `DistillError` if there is none.
    """
    if name in _DISTILLERS:
        return _DISTILLERS[name]
    try:
        path = name if ":" in name else plugged_in("distillers", name)
        method = None if path is None else import_object(path)
    except PluginError as error:
        raise DistillError(f"unusable: {error}", where="distiller", value=name) from error
    if method is None:
        raise DistillError(
            "unknown here",
            where="distiller",
            value=name,
            remedy=f"choose one of {', '.join(distiller_names())}, give your own as "
            "'package.module:function', or install the package that provides it",
        )
    if not callable(method):
        problem = f"must be a function, got {type(method).__name__}"
        raise DistillError(problem, where="distiller", value=name)
    return cast(Distiller, method)


def formation_arguments(name: str, formation: int) -> dict[str, Any]:
    """Arguments with which a distiller makes images of that formation; 0 lets it choose.

    Raises `DistillError` if it has no formation and more than 1 is requested.
    """
    if "formation" in signature(distiller(name)).parameters:
        return {"formation": formation}
    if formation > 1:
        problem = f"distiller {name!r} makes one image of each"
        raise DistillError(problem, where="formation", value=formation, remedy="set it to 1")
    return {}
