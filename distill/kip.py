"""Kernel inducing points (Nguyen et al. 2021), the distiller of HFLDD's eq. 1.

The virtual images are those from which kernel ridge regression predicts the real labels best.
The gradient is written out, not taken by autograd: a step is five matrix products in float32
and one Cholesky factorisation in float64.
"""

import torch
from torch import Tensor
from torch.nn import functional

from distill.errors import DistillError
from distill.inputs import check_inputs
from distill.kernels import Kernel, relu_ntk
from distill.registry import Progress, register
from distill.starts import start
from distill.virtual_data import VirtualData

RIDGE = 1e-6
STEPS = 300
LEARNING_RATE = 0.1
TARGETS_PER_STEP = 256


@register("kip")
def distill_kip(
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
    kernel: Kernel = relu_ntk,
    learning_rate: float = LEARNING_RATE,
) -> VirtualData:
    """Distil by kernel inducing points (HFLDD eq. 1); see `distill.registry.Distiller`.

    Labels are one-hot less 1 / num_classes. Each step predicts a new draw of 256 real images
    (all, where there are fewer). On a single class the targets are constant and the method is
    degenerate; use "dm" or "auto" there.

    Parameters
    ----------
    images, labels, num_classes, per_class, init, generator, device, progress
        As every distiller's.
    steps : int, optional (default: None)
        None takes 300.
    kernel : Kernel (default: relu_ntk, three hidden layers)
        Of inner products, with its pull-back; bind its depth with `functools.partial`.
    learning_rate : float (default: 0.1)
        Of Adam.

    Returns
    -------
    VirtualData
        Sorted by class.

    Raises
    ------
    DistillError
        If an argument is unusable.
    """
    steps = STEPS if steps is None else steps
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    begin, virtual_labels = start(init, images, labels, per_class, generator)
    real, real_targets = images.flatten(1).to(device), _targets(labels, num_classes).to(device)
    virtual, targets = begin.flatten(1).to(device), _targets(virtual_labels, num_classes).to(device)
    optimizer = torch.optim.Adam([virtual], lr=learning_rate)
    for step in range(steps):
        if len(real) > TARGETS_PER_STEP:
            drawn = torch.randperm(len(real), generator=generator)[:TARGETS_PER_STEP].to(device)
            points, point_targets = real[drawn], real_targets[drawn]
        else:
            points, point_targets = real, real_targets
        loss, virtual.grad = kip_gradient(virtual, targets, points, point_targets, kernel=kernel)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, float(loss))
    return VirtualData(
        images=virtual.reshape(begin.shape).cpu(),
        labels=virtual_labels,
        method="kip",
        steps=steps,
        seed=generator.initial_seed(),
        init=init,
    )


def kip_gradient(
    virtual: Tensor,
    virtual_targets: Tensor,
    real: Tensor,
    real_targets: Tensor,
    *,
    kernel: Kernel = relu_ntk,
) -> tuple[Tensor, Tensor]:
    """Loss of HFLDD's eq. 1 and its gradient by the virtual points.

    With S the virtual and T the real points and ridge = 1e-6 tr(K_SS) / |S|::

        loss = 1/2 || Y_T - K_TS (K_SS + ridge I)^-1 Y_S ||^2 / |T|

    (divided by |T|, so that it does not depend on the size of a minibatch). Where K_SS is not
    positive definite in float32, as of nearly equal points, all is done in float64.

    Parameters
    ----------
    virtual : Tensor
        Floating, of shape (..., n, d); leading dimensions are separate problems.
    virtual_targets : Tensor
        Of shape (..., n, k).
    real : Tensor
        Of shape (..., m, d).
    real_targets : Tensor
        Of shape (..., m, k).
    kernel : Kernel (default: relu_ntk)
        With its pull-back.

    Returns
    -------
    tuple[Tensor, Tensor]
        Loss (...) in float64, and gradient (..., n, d) in the dtype of `virtual`.

    Raises
    ------
    DistillError
        If the regression fails in float64 too: the virtual points hold NaN or infinity.
    """
    d = virtual.shape[-1]
    left, right = (torch.linalg.vector_norm(x, dim=-1).square() / d for x in (real, virtual))
    gram = virtual @ virtual.mT / d
    gram.diagonal(dim1=-2, dim2=-1).copy_(right)
    K_ss, pullback_ss = kernel(gram, right, right)
    K_ts, pullback_ts = kernel(real @ virtual.mT / d, left, right)

    system = K_ss.double()
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * diagonal.mean(-1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed.any():
        if virtual.dtype == torch.float64:
            raise DistillError("the virtual images have diverged; take a lower learning rate")
        arguments = (x.double() for x in (virtual, virtual_targets, real, real_targets))
        loss, gradient = kip_gradient(*arguments, kernel=kernel)
        return loss, gradient.to(virtual.dtype)
    weights = torch.cholesky_solve(virtual_targets.double(), factor)
    residual = (K_ts.double() @ weights - real_targets) / real.shape[-2]
    loss = 0.5 * residual.square().sum((-2, -1)) * real.shape[-2]
    dual = torch.cholesky_solve(K_ts.double().mT @ residual, factor)

    weights, residual, dual = (x.to(virtual.dtype) for x in (weights, residual, dual))
    by_system = -dual @ weights.mT
    diagonal = by_system.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * diagonal.mean(-1, keepdim=True)
    ss, ts = pullback_ss(by_system), pullback_ts(residual @ weights.mT)
    by_gram = (ss.gram + ss.gram.mT) / d
    by_gram.diagonal(dim1=-2, dim2=-1).add_(ss.left + ss.right + ts.right, alpha=2 / d)
    return loss, by_gram @ virtual + (ts.gram / d).mT @ real


def _targets(labels: Tensor, num_classes: int) -> Tensor:
    return functional.one_hot(labels, num_classes).float() - 1 / num_classes
