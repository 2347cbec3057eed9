"""Gradient matching (dataset condensation; Zhao, Mopuri and Bilen 2021).

Learns virtual images whose gradient through a network points the same way as that of real images.
`distill_gm` distils a node's own images, with the Siamese augmentation of Zhao and Bilen 2021;
`match_gradient` is the server's step of FedLGD, which has gradients only.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from distill.augmentation import Augmentation, augment_each, draw_augmentation
from distill.errors import DistillError
from distill.features import RandomConvNet, halve
from distill.formation import Formation
from distill.inputs import check_inputs
from distill.registry import Progress, register
from distill.starts import start
from distill.virtual_data import VirtualData
from task.compute.cuda_graph import graphed

STEPS = 100
LEARNING_RATE = 0.2
WIDTH = 32
REAL_PER_CLASS = 256
MATCHES_PER_NETWORK = 10
NETWORK_STEPS = 10
NETWORK_LEARNING_RATE = 0.1
SERVER_STEPS = 100
SERVER_LEARNING_RATE = 0.1
CHUNK_FLOATS = 2**20
"""Of the first layer's activations: 4 MB, for a CPU's cache."""
GPU_CHUNK_FLOATS = 2**27
"""512 MB, for a GPU's memory."""


def gradient_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum over layers and output nodes of 1 - cos (FedLGD eq. 5-6; DC eq. 10).

    An output node is a row of the weight flattened to (out, all inputs); one-dimensional parameters
    (biases, norm scales) are skipped. The length of a row does not matter, so weight differences
    work as well as gradients. A row of norm below 1e-8, which has no direction, counts close to 1
    (a zero row exactly 1). Where a row of `b` is zero, that of `a` has zero gradient.

    Parameters
    ----------
    a, b : Sequence[Tensor]
        One gradient per parameter, with the same shapes in the same order.

    Returns
    -------
    Tensor
        Scalar between 0 and twice the number of output nodes.
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
    steps: int = SERVER_STEPS,
    learning_rate: float = SERVER_LEARNING_RATE,
    progress: Progress | None = None,
    formation: int = 1,
) -> Tensor:
    """Refine virtual images until a model's gradient on them matches a target (FedLGD eq. 5-6).

    The gradient is that of the mean cross-entropy over all images, decoded, at the current
    parameters of `model`. Works on a copy in evaluation mode: batch norm uses its running
    statistics, dropout is off.

    Optimises the pixels by Adam. The published code's 500 steps of SGD (learning rate 1, momentum
    0.5) barely move images that start as noise.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W), on the device of `model`.
    labels : Tensor
        int64 (n,).
    target : Mapping[str, Tensor]
        By parameter name: a gradient, or anything in its direction, such as the weights before
        training minus those after. Must have all parameters of two or more dimensions; others are
        ignored.
    model : nn.Module
        Maps images to logits.
    steps : int (default: 100)
        Steps of Adam.
    learning_rate : float (default: 0.1)
        In units of normalised pixels.
    progress : callable, optional (default: None)
        Called after each step with (steps done, all steps, distance before the step).
    formation : int (default: 1)
        Smaller images along each side of an image, see `distill.formation`.

    Returns
    -------
    Tensor
        The refined images, in the shape and on the device of `images`.

    Raises
    ------
    DistillError
        If `target` does not fit the model or contains NaN or infinity.
    """
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    weights: dict[str, Tensor] = {n: w for n, w in frozen.named_parameters() if w.ndim > 1}
    _check_target(target, weights)
    target_gradient = [target[name].to(w) for name, w in weights.items()]
    for weight in weights.values():
        weight.requires_grad_()
    leaf = images.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=learning_rate)
    tiles = Formation.of(formation, images.shape, images.device)
    labels = tiles.repeated(labels)
    for step in range(steps):
        logits = functional_call(frozen, weights, tiles.decode(leaf))
        loss = functional.cross_entropy(logits, labels)
        gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = gradient_distance(gradient, target_gradient)
        (leaf.grad,) = torch.autograd.grad(distance, leaf)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, float(distance.detach()))
    return leaf.detach()


@register("gm")
def distill_gm(
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
    learning_rate: float = LEARNING_RATE,
    width: int = WIDTH,
) -> VirtualData:
    """Distil by gradient matching (DC, algorithm 1; augmented as in DSA).

    Each random network is used for 10 image updates and trained for 10 steps of SGD on the virtual
    images between them. An update matches, per class, the gradient on the virtual images with that
    on 256 real ones (all, if there are fewer) under the same augmentation. The networks are
    ConvNets without one-dimensional parameters, which the distance ignores.

    Parameters
    ----------
    images, labels, num_classes, per_class, init, generator, device, progress, formation
        See `distill.registry.Distiller`, also for the result and errors. Images must be at least 4
        pixels a side.
    steps : int, optional (default: None)
        Image updates; None means 100.
    learning_rate : float (default: 0.2)
        For Adam, in units of normalised pixels.
    width : int (default: 32)
        Filters per block of the networks.
    """
    steps = STEPS if steps is None else steps
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    if width < 1:
        raise DistillError(f"width must be at least 1, got {width}")
    formation = formation or 1
    initial_images, virtual_labels = start(init, images, labels, per_class, generator, formation)
    classes = torch.unique(labels).tolist()
    height, across = images.shape[2:]
    real = [images[labels == c].to(device) for c in classes]
    virtual = initial_images.reshape(len(classes), per_class, *images.shape[1:])
    virtual = virtual.to(device, copy=True)
    optimizer = torch.optim.Adam([virtual], lr=learning_rate)
    tiles = Formation.of(formation, images.shape, device)
    decoded_labels = tiles.repeated(virtual_labels.to(device))
    train = graphed(_trained, virtual.device)
    weights: list[Tensor] = []
    for step in range(steps):
        decoded = tiles.decode(virtual)
        if step % MATCHES_PER_NETWORK == 0:
            weights = draw_weights(images.shape[1:], num_classes, width, generator, device)
        else:  # train the network on the virtual images between two updates of these
            for _ in range(NETWORK_STEPS):
                augment = draw_augmentation(height, across, generator).to(device)
                weights = train(weights, augment, decoded.flatten(0, 1), decoded_labels)
        batches = [own[_choice(len(own), generator, own.device)] for own in real]
        augments = [draw_augmentation(height, across, generator) for _ in real]
        loss, gradient = matching_step(decoded, batches, classes, weights, augments)
        virtual.grad = tiles.pullback(gradient)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, float(loss))
    return VirtualData(
        images=virtual.flatten(0, 1).cpu(),
        labels=virtual_labels,
        method="gm",
        steps=steps,
        seed=generator.initial_seed(),
        init=init,
        initial_images=initial_images,
        formation=formation,
    )


def draw_weights(
    shape: Sequence[int],
    num_classes: int,
    width: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Draw a ConvNet: He-normal filters of each block, then dense weights (classes, features)."""
    channels, height, across = shape
    filters = RandomConvNet.draw(channels, min(height, across), width, generator, device).filters
    features = width * (height >> len(filters)) * (across >> len(filters))
    dense = torch.randn(num_classes, features, generator=generator) * features**-0.5
    return [*filters, dense.to(device)]


def matching_step(
    virtual: Tensor,
    real: Sequence[Tensor],
    classes: Sequence[int],
    weights: Sequence[Tensor],
    augments: Sequence[Augmentation],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Sum over classes of the gradient distance, and its gradient by the virtual images.

    Parameters
    ----------
    virtual : Tensor
        (classes, per_class, C, H, W).
    real, classes, augments
        Per class: real images (n, C, H, W), label, and augmentation for real and virtual images,
        on the CPU.
    weights : Sequence[Tensor]
        Network, see `draw_weights`.
    dtype : torch.dtype (default: torch.float32)
        Precision of the real images' pass; the virtual images' is float32.
    """
    of_device = _step_by_class if virtual.device.type == "cpu" else _step_together
    return of_device(virtual, real, classes, weights, augments, dtype)


def _step_by_class(
    virtual: Tensor,
    real: Sequence[Tensor],
    classes: Sequence[int],
    weights: Sequence[Tensor],
    augments: Sequence[Augmentation],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`matching_step` for a CPU: one class after the other stays in its cache."""
    leaves = [w.detach().requires_grad_() for w in weights]
    loss, gradient = torch.zeros(()), torch.empty_like(virtual)
    for own, others, label, augment, by_images in zip(
        virtual, real, classes, augments, gradient, strict=True
    ):
        target = real_gradient(weights, others, label, augment, dtype)
        leaf = own.detach().requires_grad_()
        error = _cross_entropy(leaves, augment(leaf), label) / len(leaf)
        by_weights = torch.autograd.grad(error, leaves, create_graph=True)
        distance = gradient_distance(by_weights, target)
        by_images.copy_(torch.autograd.grad(distance, leaf)[0])
        loss += distance.detach()
    return loss, gradient


def _step_together(
    virtual: Tensor,
    real: Sequence[Tensor],
    classes: Sequence[int],
    weights: Sequence[Tensor],
    augments: Sequence[Augmentation],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`matching_step` for a GPU: each kernel is started once for all classes, not for each."""
    device = virtual.device
    network = tuple(w.detach() for w in weights)
    counts = torch.tensor([len(own) for own in real])[:, None]
    others = pad_sequence(list(real), batch_first=True)
    shares = (torch.arange(others.shape[1]) < counts) / counts  # of a class's mean; 0 for padding
    labels = torch.tensor(classes)
    shares, labels = (x.to(device, non_blocking=True) for x in (shares, labels))

    def error(network: tuple[Tensor, ...], images: Tensor, label: Tensor, shares: Tensor) -> Tensor:
        logits = _logits(network, images).float()
        errors = functional.cross_entropy(logits, label.expand(len(images)), reduction="none")
        return errors @ shares

    def distance(images: Tensor, label: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        shares = torch.full((len(images),), 1 / len(images), device=device)
        return gradient_distance(grad(error)(network, images, label, shares), target)

    def at_once(images: Tensor) -> int:
        first_layer = len(network[0]) * images[0, :, 0].numel()
        return max(1, GPU_CHUNK_FLOATS // first_layer)

    of_real = vmap(grad(error), (None, 0, 0, 0), chunk_size=at_once(others))
    rounded = tuple(w.to(dtype) for w in network)
    target = of_real(rounded, augment_each(augments, others).to(dtype), labels, shares)
    leaf = virtual.detach().requires_grad_()
    images = augment_each(augments, leaf)
    of_virtual = vmap(grad_and_value(distance), chunk_size=at_once(images))
    by_images, distances = of_virtual(images.detach(), labels, tuple(t.float() for t in target))
    (gradient,) = torch.autograd.grad(images, leaf, by_images)
    return distances.sum(), gradient


def real_gradient(
    weights: Sequence[Tensor],
    images: Tensor,
    label: int,
    augment: Augmentation,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Gradient of the mean cross-entropy on augmented images (n, C, H, W) of one class.

    `dtype` is that of the convolutions and activations; the result is float32.
    """
    leaves = [w.detach().to(dtype).requires_grad_() for w in weights]
    total = [torch.zeros_like(w) for w in weights]
    first_layer = len(weights[0]) * images.shape[-2] * images.shape[-1]
    for chunk in torch.split(images, max(1, CHUNK_FLOATS // first_layer)):
        error = _cross_entropy(leaves, augment(chunk).to(dtype), label)
        for gradient_sum, part in zip(total, torch.autograd.grad(error, leaves), strict=True):
            gradient_sum += part
    return [gradient_sum / len(images) for gradient_sum in total]


def _cross_entropy(weights: Sequence[Tensor], images: Tensor, label: int) -> Tensor:
    """Cross-entropy of images of one class, summed."""
    logits = _logits(weights, images).float()
    return functional.cross_entropy(
        logits, torch.full((len(images),), label, device=logits.device), reduction="sum"
    )


def _logits(weights: Sequence[Tensor], images: Tensor) -> Tensor:
    *filters, dense = weights
    for weight in filters:
        images = functional.conv2d(images, weight, padding=1)
        images = halve(functional.relu(functional.group_norm(images, len(weight))))
    return images.flatten(1) @ dense.T


def _trained(
    weights: list[Tensor], augment: Augmentation, images: Tensor, labels: Tensor
) -> list[Tensor]:
    """Do a step of SGD."""
    leaves = [w.detach().requires_grad_() for w in weights]
    loss = functional.cross_entropy(_logits(leaves, augment(images)), labels)
    gradient = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        return [
            torch.add(w, g, alpha=-NETWORK_LEARNING_RATE)
            for w, g in zip(leaves, gradient, strict=True)
        ]


def _choice(n: int, generator: torch.Generator, device: torch.device) -> Tensor:
    order = torch.randperm(n, generator=generator)[:REAL_PER_CLASS]
    return order.to(device, non_blocking=True)


def _check_target(target: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    missing = sorted(weights.keys() - target.keys())
    if missing or not weights:
        raise DistillError(
            f"target must have the model's weights of two or more dimensions, lacks {missing}; "
            "name the gradients as in model.named_parameters()"
        )
    for name, weight in weights.items():
        if target[name].shape != weight.shape:
            raise DistillError(
                f"target[{name!r}] must have the weight's shape {tuple(weight.shape)}, "
                f"got {tuple(target[name].shape)}; is it from another model?"
            )
        if not target[name].isfinite().all():
            raise DistillError(
                f"target[{name!r}] holds NaN or infinity; leave out the update it came from"
            )
