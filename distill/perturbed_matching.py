"""Distribution matching around a model (FedDM, Xiong et al. 2023).

Virtual images match the real ones' class means in features and logits of models near the global
one. So the loss on them is like that on real ones wherever training may lead from there.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import (
    REAL_PER_CLASS,
    Network,
    Probe,
    match_means,
    real_means,
)
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.inputs import check_inputs
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.models import last_dense

BANK = 20
"""Perturbed models with an augmentation each, used in turn."""
LEARNING_RATE = 0.05


class Outputs:
    """Features and logits of a frozen model, with any weights."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self.names = [name for name, _ in self._model.named_parameters()]
        self._features: Tensor
        dense = self._model.get_submodule(last_dense(self._model, layer))
        dense.register_forward_pre_hook(self._keep)

    def __call__(self, weights: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, features) and logits (n, classes) of images (n, C, H, W)."""
        named = dict(zip(self.names, weights, strict=True))
        logits = functional_call(self._model, named, images)
        return self._features.flatten(1), logits

    def _keep(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._features = arguments[0]


@dataclass(frozen=True, eq=False)
class Perturbed:
    """A model near the global one: (n, C, H, W) to features and logits, (n, features + classes)."""

    outputs: Outputs
    weights: tuple[Tensor, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Features and logits, side by side."""
        return torch.cat(self.outputs(self.weights, images), dim=1)


def distill_around(
    images: Tensor,
    labels: Tensor,
    model: nn.Module,
    *,
    num_classes: int,
    per_class: int,
    radius: float = 5.0,
    steps: int,
    init: str = "class-stats",
    layer: str = "",
    generator: torch.Generator,
    progress: Progress | None = None,
) -> VirtualData:
    """Distil by matching means around a model (FedDM; Xiong et al. 2023).

    In each step and for each class: squared distance of the mean features, and of the mean logits,
    of all virtual and of up to 256 real images, at weights drawn from a normal distribution around
    the model; 20 such models are used in turn. See `distill.registry.Distiller` for other arguments
    and errors.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W), normalised, at least 4 pixels a side.
    model : nn.Module
        On the device that computes; not changed. Batch normalisation takes running statistics.
    radius : float (default: 5.0)
        rho, the greatest distance of a perturbed model, as a norm over all weights.
    layer : str (default: "")
        The dense layer whose input are the features; see :func:`task.models.last_dense`.
    """
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    device = next(model.parameters()).device
    initial, virtual_labels = start(init, images, labels, per_class, generator)
    classes = [images[labels == c] for c in torch.unique(labels)]
    outputs = Outputs(model, layer)
    probes = []
    for _ in range(min(BANK, steps)):
        network = Perturbed(outputs, perturbed(model, radius, generator))
        probes.append(draw_probe(network, classes, device, generator))
    made = VirtualData(
        initial,
        virtual_labels,
        "feddm",
        steps,
        generator.initial_seed(),
        init,
        initial_images=initial,
    )
    return matched(made, probes, device, progress)


def matched(
    virtual: VirtualData,
    probes: Sequence[Probe],
    device: torch.device,
    progress: Progress | None = None,
) -> VirtualData:
    """Optimise virtual images by a probe in each of their steps, on `device`."""
    shape = virtual.images.shape
    images = virtual.images.reshape(len(torch.unique(virtual.labels)), -1, *shape[1:])
    images = images.to(device, copy=True)
    rates = [LEARNING_RATE] * virtual.steps
    match_means(images, probes, rates, Formation.of(1, shape), progress)
    return replace(virtual, images=images.flatten(0, 1).cpu())


def draw_probe(
    network: Network, classes: Sequence[Tensor], device: torch.device, generator: torch.Generator
) -> Probe:
    """Draw a probe: an augmentation, and up to 256 real images (n, C, H, W) of each class."""
    height, across = classes[0].shape[2:]
    augment = draw_augmentation(height, across, generator).to(device)
    orders = [torch.randperm(len(own), generator=generator)[:REAL_PER_CLASS] for own in classes]
    chosen = [own[o.to(own.device)].to(device) for own, o in zip(classes, orders, strict=True)]
    means = real_means(network, augment, torch.cat(chosen), [len(own) for own in chosen])
    return Probe(network, augment, means)


def perturbed(model: nn.Module, radius: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Weights drawn from a normal distribution around a model's, within `radius` (FedDM)."""
    weights = [w.detach() for w in model.parameters()]
    noise = [torch.randn(w.shape, generator=generator).to(w.device) for w in weights]
    length = torch.stack([n.square().sum() for n in noise]).sum().sqrt()
    scale = (radius / length).clamp(max=1.0)
    return tuple(w + scale * n for w, n in zip(weights, noise, strict=True))
