"""Gradient matching, FedLGD's server step: dataset condensation (Zhao, Mopuri and Bilen 2021)."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.pixel_optimizers import pixel_optimizer
from flwr_distill.distill.registry import Progress
from flwr_distill.task.settings import ImageOptimizer

STEPS = 100
LEARNING_RATE = 0.1


def gradient_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum over layers and output nodes of 1 - cos (FedLGD eq. 5-6; DC eq. 10); a scalar.

    An output node is a row of a weight flattened to (out, all inputs); parameters of one dimension
    are skipped. Lengths do not matter, so weight differences work too. A row without direction
    (norm below 1e-8) counts as 1; where it is in `b`, that of `a` has zero gradient.
    """
    distance = torch.zeros((), device=a[0].device)
    for x, y in zip(a, b, strict=True):
        if x.ndim > 1:
            cosines = functional.cosine_similarity(x.flatten(1), y.flatten(1))
            distance = distance + (1 - cosines).sum()
    return distance


def match_gradient(
    images: Tensor,
    labels: Tensor,
    target: Mapping[str, Tensor],
    model: nn.Module,
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    progress: Progress | None = None,
    formation: int = 1,
    optimizer: ImageOptimizer = "adam",
) -> Tensor:
    """Refine virtual images until a model's gradient on them matches a target (FedLGD eq. 5-6).

    The gradient is that of the mean cross-entropy over all decoded images, in evaluation mode:
    batch norm uses running statistics. By default Adam moves the pixels: the published code's 500
    steps of SGD (learning rate 1, momentum 0.5) barely move images that start as noise.

    Parameters
    ----------
    images, labels : Tensor
        float32 (n, C, H, W) on the device of `model`, and int64 (n,).
    target : Mapping[str, Tensor]
        By parameter name: a gradient, or anything in its direction, such as weights before training
        minus those after. Must have all trained parameters of two or more dimensions.
    formation : int (default: 1)
        Smaller images along each side of an image, see `distill.formation`.
    optimizer : str (default: "adam")
        ``adam`` at `learning_rate`, or the published code's ``sgd``.

    Raises
    ------
    DistillError
        If `target` does not fit the model or contains NaN or infinity.
    """
    trained = {name for name, w in model.named_parameters() if w.ndim > 1 and w.requires_grad}
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    weights: dict[str, Tensor] = {n: w for n, w in frozen.named_parameters() if n in trained}
    _check_target(target, weights)
    target_gradient = [target[name].to(w) for name, w in weights.items()]
    for weight in weights.values():
        weight.requires_grad_()
    leaf = images.detach().clone().requires_grad_()
    stepper = pixel_optimizer(optimizer, leaf, lr=learning_rate)
    tiles = Formation.of(formation, images.shape, images.device)
    labels = tiles.repeated(labels)
    for step in range(steps):
        logits = functional_call(frozen, weights, tiles.decode(leaf))
        loss = functional.cross_entropy(logits, labels)
        gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = gradient_distance(gradient, target_gradient)
        (leaf.grad,) = torch.autograd.grad(distance, leaf)
        stepper.step()
        if progress is not None:
            progress(step + 1, steps, float(distance.detach()))
    return leaf.detach()


def _check_target(target: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    missing = sorted(weights.keys() - target.keys())
    if missing or not weights:
        raise DistillError(
            f"must have the model's weights of two or more dimensions; missing: {missing}",
            where="target",
            remedy="name the gradients as in model.named_parameters()",
        )
    for name, weight in weights.items():
        if target[name].shape != weight.shape:
            raise DistillError(
                f"must have the weight's shape {tuple(weight.shape)}; is it from another model?",
                where=f"target[{name!r}]",
                value=tuple(target[name].shape),
            )
        if not target[name].isfinite().all():
            raise DistillError(
                "contains NaN or infinity",
                where=f"target[{name!r}]",
                remedy="exclude the update it came from",
            )
