"""A user's own network, the features of which distillers match in place of random networks'."""

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.registry import distiller
from flwr_distill.task.plugin import PluginError, import_object, located


@dataclass(frozen=True, eq=False)
class OwnNetwork:
    """Features of a module, flattened; `name` is for errors."""

    name: str
    module: nn.Module

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, features) of images (n, C, H, W), differentiable by them."""
        try:
            features: Tensor = self.module(images.float()).to(images.dtype)
        except Exception as error:  # whatever another package's code does
            problem = f"fails on images of shape {tuple(images.shape[1:])}"
            raise _refused(self.name, f"{problem}: {located(error, self.name)}") from error
        if features.shape[:1] != images.shape[:1]:
            problem = f"must give a row for each of {len(images)} images"
            raise _refused(self.name, f"{problem}, got shape {tuple(features.shape)}")
        return features.flatten(1)


def own_network(name: str, weights: str = "", device: torch.device | str = "cpu") -> OwnNetwork:
    """Import a network, create it and load its weights; it is not trained.

    Parameters
    ----------
    name : str
        ``package.module:Encoder``, called without arguments; gives an `nn.Module`.
    weights : str (default: "")
        A safetensors file with the module's state. Without one, the module draws its weights, with
        the same seed everywhere.

    Raises
    ------
    DistillError
        If it cannot be imported or created, or the weights are unreadable or do not fit.
    """
    try:
        factory = import_object(name)
    except PluginError as error:
        raise _refused(name, f"unusable: {error}") from error
    if not callable(factory):
        raise _refused(name, f"must be a class, got {type(factory).__name__}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = factory()
    except Exception as error:  # whatever another package's code does
        raise _refused(name, f"cannot be created: {located(error, name)}") from error
    if not isinstance(module, nn.Module):
        raise _refused(name, f"must give an nn.Module, got {type(module).__name__}")
    if weights:
        _load(module, name, Path(weights))
    return OwnNetwork(name, module.eval().requires_grad_(False).to(device))


def takes_network(method: str) -> bool:
    """Whether a distiller compares images by features, for which it takes a network."""
    return "network" in signature(distiller(method)).parameters


def network_arguments(
    method: str, name: str, weights: str = "", device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Arguments for a user's own network, none if `name` is empty; DistillError if unusable."""
    if not name:
        if weights:
            raise DistillError("no network is named", where="weights", value=weights)
        return {}
    if not takes_network(method):
        raise _refused(name, f"distiller {method!r} takes none", "take dm")
    return {"network": own_network(name, weights, device)}


def _load(module: nn.Module, name: str, weights: Path) -> None:
    try:
        module.load_state_dict(load_file(weights))
    except (OSError, SafetensorError) as error:
        raise DistillError(
            f"unreadable: {error}",
            where="weights",
            value=str(weights),
            remedy="give a safetensors file on this machine",
        ) from error
    except RuntimeError as error:
        problem = f"not those of network {name!r}: {' '.join(str(error).split())}"
        raise DistillError(problem, where="weights", value=str(weights)) from error


def _refused(name: str, problem: str, remedy: str = "") -> DistillError:
    return DistillError(problem, where="network", value=name, remedy=remedy)
