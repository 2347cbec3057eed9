"""Networks that were trained elsewhere, with a head for the run, by ``backbone.network``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flwr_distill.task.backbone_settings import BackboneSettings
from flwr_distill.task.backbones.frozen import Frozen, side_for
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError
from flwr_distill.task.last_layer import last_dense
from flwr_distill.task.plugin import PluginError, call_plugin, import_object, located


@dataclass(frozen=True)
class Metadata:
    """What a network was trained on, as its package states."""

    side: int
    mean: tuple[float, ...]  # by channel, of pixels in [0, 1]
    std: tuple[float, ...]
    interpolation: str
    fixed: bool  # whether it takes images of this side alone


def pretrained(own: BackboneSettings, spec: DataSpec) -> Frozen:
    """A network by name, without its last layer, and a linear head on its features.

    It sees images as its package states, unless settings say otherwise: small ones are enlarged to
    128 pixels where it takes any side. Without ``backbone.weights`` its weights are random.

    Raises
    ------
    ModelError
        If it cannot be built here, or does not map images to features.
    """
    if spec.kind != "image":
        raise _refused(own, f"takes images, and the inputs are of kind {spec.kind}", "leave it out")
    family, _, name = own.network.partition(":")
    build = PACKAGES.get(family)
    network, known = build(own, name) if build else (_own_network(own), None)
    size, mean, std = own.size or None, own.numbers("mean"), own.numbers("std")
    if known:
        size = size or (known.side if known.fixed else side_for(spec, known.side))
        mean, std = mean or known.mean, std or known.std
    mean, std = mean or spec.mean, std or spec.std
    channels = max(len(mean), len(std))
    sides = (size, size) if size else spec.shape[1:]
    return Frozen(
        network,
        _width(own, network, (channels, *sides)),
        spec,
        size=size,
        mean=mean * (channels // len(mean)),
        std=std * (channels // len(std)),
        interpolation=own.interpolation or (known.interpolation if known else "bilinear"),
    )


def _torchvision(own: BackboneSettings, name: str) -> tuple[nn.Module, Metadata]:
    import torchvision.models
    from torchvision.models import get_model, get_model_weights, list_models  # slow

    if name not in list_models(torchvision.models):
        raise _refused(own, "torchvision has no such classifier", "use torchvision:resnet18")
    network = get_model(name, weights=None)
    network.set_submodule(last_dense(network), nn.Identity())
    seen = get_model_weights(name).DEFAULT.transforms()
    side, interpolation = seen.crop_size[0], seen.interpolation.value
    fixed = hasattr(network, "image_size")
    if fixed:
        _check_side(own, side)
    return network, Metadata(side, tuple(seen.mean), tuple(seen.std), interpolation, fixed)


def _timm(own: BackboneSettings, name: str) -> tuple[nn.Module, Metadata]:
    try:
        import timm  # slow, and an extra
        from timm.data.config import resolve_data_config
    except ModuleNotFoundError as error:
        raise _refused(own, str(error), "pip install 'flwr-distill[timm]'") from error
    # Other names are those of files, and of networks that timm downloads.
    if not timm.is_model(name):
        raise _refused(own, "timm has no such network", "timm.list_models() has the names")
    try:
        network = timm.create_model(name, num_classes=0)
    except RuntimeError as error:  # of a tag that the network does not have
        raise _refused(own, str(error), "leave out what follows the full stop") from error
    seen = resolve_data_config(model=network)  # type: ignore[no-untyped-call]
    published: Any = network.pretrained_cfg
    side, fixed = seen["input_size"][-1], bool(published.get("fixed_input_size"))
    if fixed and own.size not in (0, side):
        try:
            network = timm.create_model(name, num_classes=0, dynamic_img_size=True)
        except TypeError:
            _check_side(own, side)
    return network, Metadata(side, seen["mean"], seen["std"], seen["interpolation"], fixed)


def _own_network(own: BackboneSettings) -> nn.Module:
    try:
        network: nn.Module = call_plugin(import_object(own.network), own.network, nn.Module)
    except PluginError as error:
        raise _refused(own, error.problem, error.remedy) from error
    return network


PACKAGES: dict[str, Callable[[BackboneSettings, str], tuple[nn.Module, Metadata]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
}


def is_own_network(network: str) -> bool:
    """Whether ``backbone.network`` names code to import, and no network of a package's list."""
    return bool(network) and network.partition(":")[0] not in PACKAGES


def _check_side(own: BackboneSettings, side: int) -> None:
    if own.size not in (0, side):
        raise ModelError(
            f"{own.network} takes images of {side} pixels a side alone",
            where="backbone.size",
            value=own.size,
            remedy="leave it at 0",
        )


def _width(own: BackboneSettings, network: nn.Module, shape: tuple[int, ...]) -> int:
    """Number of features that the network makes of images of a shape."""
    try:
        with torch.no_grad():
            features = network.eval()(torch.zeros(2, *shape)).flatten(1)
    except Exception as error:  # of any package's code
        taken = "x".join(map(str, shape))
        problem = f"fails on images of {taken}: {located(error, type(network).__module__)}"
        raise _refused(
            own, problem, "set backbone.size, or backbone.mean for three channels"
        ) from error
    if len(features) != 2:
        raise _refused(own, "does not keep images apart", "return features of shape (n, width)")
    return int(features.shape[1])


def _refused(own: BackboneSettings, problem: str, remedy: str) -> ModelError:
    return ModelError(problem, where="backbone.network", value=own.network, remedy=remedy)
