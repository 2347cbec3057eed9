"""Accuracy of networks trained on virtual digits from the papers' loop and from ours.

Both start from the same `class-stats` images, 10 per class, with the same optimiser and number of
steps; the same small network is trained on each set.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import distill_reference
from flwr_distill.distill import distill_dm
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import LEARNING_RATE
from flwr_distill.distill.starts import start
from flwr_distill.task.datasets import DataSpec, Samples, load_dataset
from flwr_distill.task.evaluation import evaluate_model
from flwr_distill.task.models.papers import digits_cnn

PER_CLASS = 10
BLOCKS = 2
JUDGES = 3
JUDGE_STEPS = 400
Pixels = Callable[[Tensor], list[Tensor]]


def accuracies(steps: int, width: int, device: torch.device) -> tuple[float, float]:
    """Test accuracy of distribution matching (reference, ours), mean over three networks."""
    data = load_dataset("digits")
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    ours = distill_dm(
        train.inputs,
        train.labels,
        num_classes=data.spec.num_classes,
        per_class=PER_CLASS,
        steps=steps,
        generator=torch.Generator().manual_seed(0),
        device=device,
        width=width,
    )
    published = _published(train, steps, width, device)
    return _judge(published, test, data.spec), _judge(
        Samples(ours.images, ours.labels), test, data.spec
    )


def _published(real: Samples, steps: int, width: int, device: torch.device) -> Samples:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    classes = _by_class(real, device)

    height, across = real.inputs.shape[2:]

    def step(virtual: Tensor) -> list[Tensor]:
        augment = draw_augmentation(height, across, generator)
        return distill_reference.dm_step(classes, list(virtual), augment, width, BLOCKS)

    return _refine(real, steps, LEARNING_RATE, generator, device, step)


def _refine(
    real: Samples,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    device: torch.device,
    step: Pixels,
) -> Samples:
    initial_images, labels = start("class-stats", real.inputs, real.labels, PER_CLASS, generator)
    virtual = initial_images.reshape(-1, PER_CLASS, *initial_images.shape[1:]).to(device)
    optimizer = torch.optim.Adam([virtual], lr=learning_rate)
    for _ in range(steps):
        virtual.grad = torch.stack(step(virtual.detach()))
        optimizer.step()
    return Samples(virtual.flatten(0, 1).cpu(), labels)


def _by_class(real: Samples, device: torch.device) -> list[Tensor]:
    """Split into classes; digits has fewer than 256 images of each, so each step uses all."""
    classes = range(int(real.labels.max()) + 1)
    return [real.inputs[real.labels == c].to(device) for c in classes]


def _judge(virtual: Samples, test: Samples, spec: DataSpec) -> float:
    total = 0.0
    for seed in range(JUDGES):
        torch.manual_seed(seed)
        model = digits_cnn(spec)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(JUDGE_STEPS):
            batch = torch.randint(len(virtual), (32,))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(virtual.inputs[batch]), virtual.labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        total += evaluate_model(model, test)[0]
    return total / JUDGES
