"""Matching of a trajectory of models (DynaFed, Pi et al. 2023; after Cazenavette et al. 2022).

Learns virtual images and soft labels on which a few steps of SGD lead from one global model of a
run to a later one, without the nodes' data.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.virtual_data import VirtualData

AHEAD = 3
"""Models between which the target lies, counted from the start."""
LABEL_LEARNING_RATE = 0.01
STEP_SIZE = 0.004
"""Learning rate of SGD on virtual data at first; its logarithm is learned as labels are. The
published code's 0.04 is for the mean over ten classes, too, where the loss here is their sum."""

Parameters = Mapping[str, Tensor]


def match_trajectory(
    trajectory: Sequence[Parameters],
    model: nn.Module,
    shape: Sequence[int],
    num_classes: int,
    *,
    per_class: int = 15,
    steps: int,
    follow_steps: int = 20,
    learning_rate: float = 0.05,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> VirtualData:
    """Learn virtual data whose gradient steps follow a trajectory (DynaFed eq. 2-3).

    Each step draws a start w_t of the trajectory, and as a target the mean of two or three draws
    from the next three models. It lessens ``||w' - target||^2 / ||w_t - target||^2``, where w' is
    what `follow_steps` steps of SGD make of w_t on all virtual data, augmented in each. Images
    start as noise, labels as uniform distributions.

    Parameters
    ----------
    trajectory : Sequence[Mapping[str, Tensor]]
        Trained parameters by name, from model to model; at least two models.
    model : nn.Module
        Their architecture, on the device that computes. A copy in evaluation mode is used: batch
        normalisation takes its running statistics, dropout is off.
    shape : Sequence[int]
        (C, H, W) of an image, at least 4 pixels a side.
    per_class : int (default: 15)
        Images of each class; as labels are learned, that is only their number.
    steps : int
        Steps of Adam on images, labels and learning rate of SGD.
    learning_rate : float (default: 0.05)
        For images, in units of normalised pixels.
    generator : torch.Generator
        On the CPU.
    progress : callable, optional (default: None)
        Called after each step with (steps done, all steps, distance before the step).

    Returns
    -------
    VirtualData
        With soft labels; each image's label is the likeliest one.

    Raises
    ------
    DistillError
        If the trajectory is too short or never moves, or images become infinite.
    """
    if len(trajectory) < 2:
        raise DistillError(f"a trajectory needs two models or more, got {len(trajectory)}")
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    device = next(frozen.parameters()).device
    models = [{name: w.to(device) for name, w in point.items()} for point in trajectory]
    n = num_classes * per_class
    images = torch.randn(n, *shape, generator=generator).to(device).requires_grad_()
    label_logits = torch.zeros(n, num_classes, device=device, requires_grad=True)
    log_size = torch.tensor(STEP_SIZE, device=device).log().requires_grad_()
    optimizer = torch.optim.Adam(
        [
            {"params": [images], "lr": learning_rate},
            {"params": [label_logits, log_size], "lr": LABEL_LEARNING_RATE},
        ]
    )
    moved = False
    for step in range(steps):
        start, target = draw_target(models, generator)
        apart = squared_distance(start, target)
        if not float(apart):  # a failed round did not change the model
            continue
        moved = True
        augments = [draw_augmentation(shape[1], shape[2], generator) for _ in range(follow_steps)]
        reached = dict(start)
        for augment in augments:
            reached = sgd_step(
                frozen, reached, augment.to(device)(images), label_logits, log_size.exp()
            )
        distance = squared_distance(reached, target) / apart
        optimizer.zero_grad(set_to_none=True)
        distance.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, float(distance.detach()))
    if not moved:
        raise DistillError("the models of the trajectory are all alike")
    soft_labels = label_logits.detach().softmax(1).cpu()
    return VirtualData(
        images.detach().cpu(),
        soft_labels.argmax(1),
        method="trajectory",
        steps=steps,
        seed=generator.initial_seed(),
        init="noise",
        soft_labels=soft_labels,
    )


def draw_target(
    models: Sequence[Parameters], generator: torch.Generator
) -> tuple[Parameters, dict[str, Tensor]]:
    """Draw a start, and the mean of some of the next models (DynaFed's weight averaging)."""

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    ahead = min(AHEAD, len(models) - 1)
    at = drawn(0, len(models) - 1 - ahead)
    count = drawn(min(2, ahead), ahead)
    chosen = [models[at + drawn(1, ahead)] for _ in range(count)]
    mean = {name: torch.stack([point[name] for point in chosen]).mean(0) for name in models[at]}
    return models[at], mean


def squared_distance(one: Parameters, other: Parameters) -> Tensor:
    """Sum of squared differences over all parameters."""
    return torch.stack([(w - other[name]).square().sum() for name, w in one.items()]).sum()


def sgd_step(
    model: nn.Module, weights: Parameters, images: Tensor, label_logits: Tensor, size: Tensor
) -> dict[str, Tensor]:
    """One step of SGD on the cross-entropy with soft labels, differentiable by what it is made of.

    `weights` are the trained parameters before the step, images (n, C, H, W), label_logits the
    logarithms of the soft labels but for a constant (n, classes), size the learning rate, a scalar.
    """
    weights = {n: w if w.requires_grad else w.clone().requires_grad_() for n, w in weights.items()}
    logits = functional_call(model, weights, images)
    loss = functional.cross_entropy(logits, label_logits.softmax(1))
    gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    return {name: w - size * g for (name, w), g in zip(weights.items(), gradient, strict=True)}
