"""Distribution matching with knowledge of peers (FedAF, Wang et al. 2024).

Virtual images match the class means of real ones in features, and bring the model's mean logits of
each class near those that all nodes have of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flwr_distill.distill.inputs import check_inputs
from flwr_distill.distill.perturbed_matching import BANK, Outputs, draw_probe, matched
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData

MAX_SEED = 2**31


@dataclass(frozen=True, eq=False)
class Mixed:
    """Features of a model mixed with a random one, and scaled logits of the model itself."""

    outputs: Outputs
    mixture: Sequence[Tensor]
    weights: Sequence[Tensor]
    scale: float

    def __call__(self, images: Tensor) -> Tensor:
        """Both, side by side: (n, features + classes)."""
        features, _ = self.outputs(self.mixture, images)
        _, logits = self.outputs(self.weights, images)
        return torch.cat([features, self.scale * logits], dim=1)


def distill_with_peers(
    images: Tensor,
    labels: Tensor,
    model: nn.Module,
    peers: Tensor,
    known: Tensor,
    *,
    fresh: Callable[[int], nn.Module],
    num_classes: int,
    per_class: int,
    weight: float = 0.8,
    gamma: float = 0.9,
    steps: int,
    init: str = "class-stats",
    layer: str = "",
    generator: torch.Generator,
    progress: Progress | None = None,
) -> VirtualData:
    """Distil by matching mean features, and the mean logits of peers (FedAF's L_DM and L_CDC).

    The loss of a step is the sum over classes of ``|mu_real - mu_virtual|^2 + weight SW(u, v)``: mu
    are mean features of a model ``gamma w + (1 - gamma) w'`` with random w', u are the mean logits
    of the virtual images by the model w itself, and v the peers'. SW is the squared sliced
    Wasserstein distance of order 2, which between two points is ``|u - v|^2 / num_classes``.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W), normalised, at least 4 pixels a side.
    labels : Tensor
        int64 (n,), in [0, num_classes).
    model : nn.Module
        w, on the device that computes; not changed. Batch normalisation takes running statistics.
    peers : Tensor
        Mean logits of the nodes' samples of each class, (num_classes, num_classes).
    known : Tensor
        Which classes these have, bool (num_classes,). Others take the mean logits of the images.
    fresh : callable
        Makes a model of the same architecture with random weights, given a seed.
    per_class : int
        Virtual images of each class present.
    weight : float (default: 0.8)
        lambda_loc, weight of the distance to the peers' logits.
    gamma : float (default: 0.9)
        Share of the model in a mixture.
    steps : int
        Steps of Adam; of the mixtures 20 are drawn, and used in turn.
    init : str (default: "class-stats")
        Start of the images, see `distill.starts`.
    layer : str (default: "")
        The dense layer whose input are the features; see :func:`task.models.last_dense`.
    generator : torch.Generator
        On the CPU.
    progress : callable, optional (default: None)
        Called after each step with (steps done, all steps, loss).
    """
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    weights = [w.detach() for w in model.parameters()]
    device, scale = weights[0].device, math.sqrt(weight / num_classes)
    present = torch.unique(labels)
    classes = [images[labels == c] for c in present]
    rows = present.to(peers.device)
    initial, virtual_labels = start(init, images, labels, per_class, generator)
    outputs = Outputs(model, layer)
    probes = []
    for _ in range(min(BANK, steps)):
        seed = int(torch.randint(MAX_SEED, (), generator=generator))
        random = [w.detach().to(device) for w in fresh(seed).parameters()]
        mixture = [gamma * w + (1 - gamma) * r for w, r in zip(weights, random, strict=True)]
        probe = draw_probe(Mixed(outputs, mixture, weights, scale), classes, device, generator)
        features, own = probe.means.tensor_split([probe.means.shape[1] - num_classes], dim=1)
        logits = torch.where(known[rows, None].to(device), scale * peers[rows].to(device), own)
        probes.append(replace(probe, means=torch.cat([features, logits], dim=1)))
    made = VirtualData(
        initial,
        virtual_labels,
        "fedaf",
        steps,
        generator.initial_seed(),
        init,
        initial_images=initial,
    )
    return matched(made, probes, device, progress)
