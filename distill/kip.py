"""Kernel inducing points (Nguyen et al. 2021), the distiller of HFLDD's eq. 1.

Learns the virtual images from which kernel ridge regression best predicts the real labels, with a
gradient that is written out instead of taken by autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.features import are_vectors
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.inputs import check_inputs
from flwr_distill.distill.ntk import Pullback, ntk
from flwr_distill.distill.registry import Progress, register
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.compute.cuda_graph import graphed

RIDGE = 1e-6
STEPS = 300
LEARNING_RATE = 0.1
TARGETS_PER_STEP = 256
SUPPORT_NEGATIVES = 100
POOL_NEGATIVES = 300
NEGATIVES_PER_STEP = 100
GRID = 4
"""Tiles along each side of an image that is cut up."""


@dataclass(frozen=True)
class Descent:
    """How KIP's loss is minimised, and its ridge.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        Of Adam on the virtual images.
    batch_size : int (default: 256)
        Real images that a step predicts, newly drawn for each.
    ridge : float (default: 1e-6)
        lambda of HFLDD's eq. 1.
    relative : bool (default: True)
        Whether lambda is multiplied by the mean of K_SS' diagonal, as in KIP's own paper.
    """

    learning_rate: float = LEARNING_RATE
    batch_size: int = TARGETS_PER_STEP
    ridge: float = RIDGE
    relative: bool = True


DESCENT = Descent()
"""The usual one."""


def distill_kip(
    images: Tensor,
    labels: Tensor,
    *,
    generator: torch.Generator,
    formation: int = 1,
    **options: Any,
) -> VirtualData:
    """Distil by kernel inducing points (HFLDD eq. 1); see `distill.registry.Distiller`.

    Targets are one-hot labels minus 1 / num_classes. Each of the 300 steps predicts 256 newly drawn
    real images (all, if there are fewer); `descent` changes that. With a single class the targets
    are constant and there is nothing to learn, unless `with_negatives` is set. Then 100 images of
    no class stay next to the virtual images; of 300 more, each step predicts 100. None of them
    leaves the node.
    """
    (virtual,) = distill_kip_many(
        [(images, labels)], generators=[generator], formation=formation, **options
    )
    return virtual


VARIANTS: dict[str, dict[str, Any]] = {
    "kip": {},
    "kip-negatives": {"with_negatives": True},
}
"""Registered names and the arguments of `distill_kip` they stand for."""

SHOWS_UNUSUAL_RECORDS = (
    "KIP fits the label of every record, so its virtual images can show an attacker records that "
    "are unlike the others of their class (docs/privacy.md); dm shows fewer of them"
)

for _name, _arguments in VARIANTS.items():
    register(_name, caution=SHOWS_UNUSUAL_RECORDS)(partial(distill_kip, **_arguments))


def distill_kip_many(
    sets: Sequence[tuple[Tensor, Tensor]],
    *,
    num_classes: int,
    per_class: int,
    init: str = "class-stats",
    steps: int | None = None,
    generators: Sequence[torch.Generator],
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    formation: int = 1,
    with_negatives: bool = False,
    descent: Descent = DESCENT,
) -> list[VirtualData]:
    """Distil several nodes' data in one call; each result is as from `distill_kip` alone.

    Sets with the same number of classes and of images (or more than a step predicts) form one
    batch, which reports its mean loss: small problems are many times faster together. All have one
    shape (C, H, W).
    """
    steps, formation = STEPS if steps is None else steps, formation or 1
    batches: dict[tuple[int, int], list[_Problem]] = {}
    for place, ((images, labels), generator) in enumerate(zip(sets, generators, strict=True)):
        check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
        initial_images, virtual_labels = start(
            init, images, labels, per_class, generator, formation
        )
        count = SUPPORT_NEGATIVES + POOL_NEGATIVES if with_negatives else 0
        negative_images = negatives(images, count, generator).flatten(1).to(device)
        negative_targets = torch.full((count, num_classes), -1 / num_classes, device=device)
        no_class = _Points(negative_images, negative_targets)
        problem = _Problem(
            place=place,
            initial_images=initial_images,
            labels=virtual_labels,
            real=_Points(images.flatten(1).to(device), _targets(labels, num_classes).to(device)),
            support=_Points(*(x[:SUPPORT_NEGATIVES] for x in no_class)),
            pool=_Points(*(x[SUPPORT_NEGATIVES:] for x in no_class)),
            generator=generator,
        )
        size = (len(initial_images), min(len(images), descent.batch_size))
        batches.setdefault(size, []).append(problem)

    results: dict[int, VirtualData] = {}
    for problems in batches.values():
        shape = problems[0].initial_images.shape
        batch = _Batch(
            problems,
            num_classes,
            steps,
            Formation.of(formation, shape, device),
            descent,
            progress,
        )
        virtual = batch.optimised()
        for problem, images in zip(problems, virtual.cpu(), strict=True):
            results[problem.place] = VirtualData(
                images=images,
                labels=problem.labels,
                method="kip-negatives" if with_negatives else "kip",
                steps=steps,
                seed=problem.generator.initial_seed(),
                init=init,
                initial_images=problem.initial_images,
                formation=formation,
            )
    return [results[place] for place in range(len(sets))]


class KipStep(NamedTuple):
    """Loss (...) of HFLDD's eq. 1 in float64, and its gradient by the virtual points."""

    loss: Tensor
    by_virtual: Tensor


def kip_gradient(
    virtual: Tensor,
    virtual_targets: Tensor,
    real: Tensor,
    real_targets: Tensor,
    descent: Descent = DESCENT,
) -> KipStep:
    """Loss of HFLDD's eq. 1 and its gradient by the virtual points.

    With S the virtual and T the real points, and ridge = lambda or lambda tr(K_SS) / |S|::

        loss = 1/2 || Y_T - K_TS (K_SS + ridge I)^-1 Y_S ||^2 / |T|

    The division by |T| makes the loss independent of the minibatch size. Virtual points are (...,
    n, d) with targets (..., n, k), real ones (..., m, d) and (..., m, k). If K_SS is not positive
    definite in float32 (nearly equal points), everything is computed in float64; to know that, the
    host waits for a GPU. Raises DistillError if float64 fails too: the points are NaN or infinite.
    """
    regression = _Regression.of(virtual, real, descent)
    if regression.failed.any():
        if virtual.dtype == torch.float64:
            raise DistillError(
                "the virtual images have diverged", remedy="use a lower learning rate"
            )
        arguments = (x.double() for x in (virtual, virtual_targets, real, real_targets))
        step = kip_gradient(*arguments, descent)
        return step._replace(by_virtual=step.by_virtual.to(virtual.dtype))
    return regression.step(virtual_targets, real_targets)


def _unchecked_gradient(
    descent: Descent,
    virtual: Tensor,
    virtual_targets: Tensor,
    real: Tensor,
    real_targets: Tensor,
) -> KipStep:
    """`kip_gradient` in the points' precision; loss and gradient are NaN where that does not do."""
    regression = _Regression.of(virtual, real, descent)
    step = regression.step(virtual_targets, real_targets)
    failed = regression.failed
    return step._replace(
        loss=step.loss.masked_fill(failed, torch.nan),
        by_virtual=step.by_virtual.masked_fill(failed[..., None, None], torch.nan),
    )


class _Regression(NamedTuple):
    """Kernels of eq. 1, and the factor of K_SS + ridge I in float64, where that has not failed."""

    K_ts: Tensor
    pullback_ss: Pullback
    pullback_ts: Pullback
    factor: Tensor
    failed: Tensor
    descent: Descent

    @classmethod
    def of(cls, virtual: Tensor, real: Tensor, descent: Descent) -> "_Regression":
        K_ss, pullback_ss = ntk(virtual)
        K_ts, pullback_ts = ntk(virtual, real)
        system = K_ss.double()
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal += descent.ridge * (diagonal.mean(-1, keepdim=True) if descent.relative else 1)
        factor, info = torch.linalg.cholesky_ex(system)
        # On a GPU info is 0 for NaN (pytorch #64818); any NaN or infinity reaches the diagonal.
        finite = factor.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()
        failed = (info != 0) | ~finite
        return cls(K_ts, pullback_ss, pullback_ts, factor, failed, descent)

    def step(self, virtual_targets: Tensor, real_targets: Tensor) -> KipStep:
        K_ts, factor = self.K_ts, self.factor
        weights = _solved(factor, virtual_targets.double())
        residual = (K_ts.double() @ weights - real_targets) / K_ts.shape[-2]
        loss = 0.5 * residual.square().sum((-2, -1)) * K_ts.shape[-2]
        dual = _solved(factor, K_ts.double().mT @ residual)

        weights, residual, narrow_dual = (x.to(K_ts.dtype) for x in (weights, residual, dual))
        by_system = -narrow_dual @ weights.mT
        if self.descent.relative:  # the ridge depends on the points, too
            diagonal = by_system.diagonal(dim1=-2, dim2=-1)
            diagonal += self.descent.ridge * diagonal.mean(-1, keepdim=True)
        by_virtual = self.pullback_ss(by_system) + self.pullback_ts(residual @ weights.mT)
        return KipStep(loss, by_virtual)


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """Solve by a Cholesky factor; of several matrices, `torch.cholesky_solve` waits for the GPU."""
    if factor.ndim == 2:
        return torch.cholesky_solve(right, factor)
    half: Tensor = torch.linalg.solve_triangular(factor, right, upper=False)
    whole: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return whole


class _Points(NamedTuple):
    """Points (n, d) with their targets (n, k)."""

    points: Tensor
    targets: Tensor

    def draw(self, size: int, generator: torch.Generator) -> "_Points":
        """Draw `size` points without replacement; all of them in order if there are no more."""
        if len(self.points) <= size:
            return self
        indices = torch.randperm(len(self.points), generator=generator)[:size]
        indices = indices.to(self.points.device, non_blocking=True)
        return _Points(self.points[indices], self.targets[indices])


@dataclass(frozen=True, eq=False)
class _Problem:
    """The data of one node."""

    place: int
    initial_images: Tensor
    labels: Tensor
    real: _Points
    support: _Points
    pool: _Points
    generator: torch.Generator

    def draw(self, batch_size: int) -> _Points:
        """Draw what a step predicts: real images and negatives."""
        real = self.real.draw(batch_size, self.generator)
        others = self.pool.draw(NEGATIVES_PER_STEP, self.generator)
        return _Points(
            torch.cat([real.points, others.points]), torch.cat([real.targets, others.targets])
        )


@dataclass(frozen=True, eq=False)
class _Batch:
    """Problems of one size."""

    problems: list[_Problem]
    num_classes: int
    steps: int
    formation: Formation
    descent: Descent
    progress: Progress | None

    def optimised(self) -> Tensor:
        """Minimise eq. 1; returns the virtual images (B, n, C, H, W).

        To learn that a step needs float64, the host would wait for a GPU each time. Instead, what
        fails turns NaN and stays so; if that is seen at the end, which is rare, all steps are
        repeated with a check of each. With `progress`, each step's loss shows it at once.
        """
        device = self.problems[0].real.points.device
        unchecked = graphed(partial(_unchecked_gradient, self.descent), device)
        any_precision = partial(kip_gradient, descent=self.descent)

        def checked(*arguments: Tensor) -> KipStep:
            step = unchecked(*arguments)
            step = step._replace(loss=step.loss.cpu())  # waits
            return step if step.loss.isfinite().all() else any_precision(*arguments)

        if device.type == "cpu":
            return self._descended(any_precision)
        if self.progress is not None:
            return self._descended(checked)
        states = [problem.generator.get_state() for problem in self.problems]
        virtual = self._descended(unchecked)
        if virtual.isfinite().all():
            return virtual
        for problem, state in zip(self.problems, states, strict=True):
            problem.generator.set_state(state)
        return self._descended(checked)

    def _descended(self, gradient_of: Callable[..., KipStep]) -> Tensor:
        """Do the steps with a gradient as from `kip_gradient`."""
        problems, formation = self.problems, self.formation
        device = problems[0].real.points.device
        virtual = torch.stack([p.initial_images for p in problems]).to(device)
        targets = torch.stack([_targets(p.labels, self.num_classes) for p in problems]).to(device)
        support, support_targets = (
            torch.stack(x) for x in zip(*(p.support for p in problems), strict=True)
        )
        targets = torch.cat([targets.repeat_interleave(formation.factor**2, 1), support_targets], 1)
        optimizer = torch.optim.Adam([virtual], lr=self.descent.learning_rate)
        # Clamp to the node's range of pixels: networks trained on images beyond it diverge.
        lowest, highest = (
            torch.stack([extreme(p.real.points) for p in problems]).reshape(-1, 1, 1, 1, 1)
            for extreme in (torch.amin, torch.amax)
        )
        size = self.descent.batch_size
        for step in range(self.steps):
            points, point_targets = (
                torch.stack(x) for x in zip(*(p.draw(size) for p in problems), strict=True)
            )
            decoded = formation.decode(virtual)
            seen = torch.cat([decoded.flatten(2), support], 1)
            gradient = gradient_of(seen, targets, points, point_targets)
            by_decoded = gradient.by_virtual[:, : decoded.shape[1]].reshape(decoded.shape)
            virtual.grad = formation.pullback(by_decoded)
            optimizer.step()
            virtual.clamp_(lowest, highest)
            if self.progress is not None:
                self.progress(step + 1, self.steps, float(gradient.loss.mean()))
        return virtual


def _targets(labels: Tensor, num_classes: int) -> Tensor:
    return functional.one_hot(labels, num_classes).float() - 1 / num_classes


def negatives(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Make images of no class from real ones: mirrored, transposed, or cut up and shuffled.

    They have the real images' strokes and textures in other places, and stay on the node. Vectors
    have no parts to move: DistillError.
    """
    if count and are_vectors(images.shape):
        raise DistillError(
            "kip-negatives cuts up images, and samples are vectors",
            where="distiller",
            value="kip-negatives",
            remedy="take dm",
        )
    chosen = images[torch.randint(len(images), (count,), generator=generator).to(images.device)]
    kinds = torch.randint(3, (count,), generator=generator).to(images.device)
    turned = chosen.mT if images.shape[-1] == images.shape[-2] else chosen.flip(-1, -2)
    moved = torch.where((kinds == 0)[:, None, None, None], chosen.flip(-1), turned)
    return torch.where((kinds == 2)[:, None, None, None], shuffled(chosen, generator), moved)


def shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image into 4x4 tiles and shuffle them; remaining pixels stay in place."""
    count, channels, height, width = images.shape
    rows, columns = height // GRID, width // GRID
    inner = images[..., : GRID * rows, : GRID * columns]
    tiles = inner.reshape(count, channels, GRID, rows, GRID, columns).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(count, GRID * GRID, generator=generator).argsort(1).to(images.device)
    permuted = tiles.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order]
    together = permuted.reshape(count, GRID, GRID, *permuted.shape[2:]).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[..., : GRID * rows, : GRID * columns] = together.reshape(inner.shape)
    return result
