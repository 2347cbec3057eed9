"""Judges a training set by the accuracy of networks trained on it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.training import epoch_batches
from flwr_distill.distill.registry import Progress
from flwr_distill.task.augmentation import Augment, augmented, chosen_changes
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.evaluation import evaluate_model
from flwr_distill.task.models import create_model, model_names

REPORT_EVERY = 10
"""Steps between reports of progress: each makes a GPU wait."""


@dataclass(frozen=True)
class Judge:
    """A network and how it is trained, with the same number of steps for sets of all sizes.

    `schedule` is the learning rate's factor by the share of the steps done; `augment` is the
    setting ``train.augment``.
    """

    name: str
    model: str
    steps: int
    batch_size: int
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    schedule: Callable[[float], float]
    augment: str


def _adam(weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=1e-3)


def _sgd(weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=5e-4)


def _constant(done: float) -> float:
    return 1.0


def _cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _tenth_after_half(done: float) -> float:
    return 1.0 if done <= 0.5 else 0.1


QUICK = Judge("quick", "auto", 500, 64, _adam, _constant, "none")
"""The data set's default network."""
CONVNET = Judge("ConvNet", "convnet3", 1000, 256, _sgd, _tenth_after_half, "auto")
"""``evaluate_synset`` of Zhao and Bilen's DSA and DM: 1,000 epochs of minibatches of 256, which are
1,000 steps for sets of up to 256 images."""
LENET = Judge("LeNet", "hfldd-mnist", 3000, 64, _adam, _cosine, "auto")
MLP = Judge("MLP", "mlp", 3000, 64, _adam, _cosine, "auto")
RESNET = Judge("ResNet-8", "resnet8", 3000, 64, _adam, _cosine, "auto")
"""Distillers use no such network, and no MLP."""

JUDGES = {"quick": (QUICK,), "full": (QUICK, CONVNET, LENET, MLP, RESNET)}


def judges(name: str, spec: DataSpec) -> tuple[Judge, ...]:
    """The judges of a panel, ``quick`` or ``full``, whose networks fit the data."""
    fitting = {"auto", *model_names(spec)}
    return tuple(judge for judge in JUDGES[name] if judge.model in fitting)


def train_and_score(
    judge: Judge,
    train: Samples,
    test: Samples,
    spec: DataSpec,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> float:
    """Train a judge's network (see `trained`) and return its accuracy in [0, 1]."""
    model = trained(judge, train, spec, seed=seed, device=device, progress=progress)
    return evaluate_model(model, test, torch.device(device))[0]


def trained(
    judge: Judge,
    train: Samples,
    spec: DataSpec,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> nn.Module:
    """Train a judge's network, from initial weights that only `seed` determines.

    Labels may be distributions over the classes, float32 (n, classes).
    """
    device = torch.device(device)
    model = create_model(judge.model, spec, seed=seed).to(device)
    losses = _training(judge, model, train, spec, seed, device)
    for step, loss in enumerate(islice(losses, judge.steps), start=1):
        if progress and (step % REPORT_EVERY == 0 or step == judge.steps):
            progress(step, judge.steps, float(loss))
    return model


def training_seconds(
    judge: Judge, train: Samples, spec: DataSpec, device: torch.device | str = "cpu"
) -> float:
    """Expected duration of a judge's training, by two of its steps after a first one."""
    device = torch.device(device)
    model = create_model(judge.model, spec).to(device)
    losses = _training(judge, model, train, spec, 0, device)
    ends = []
    for loss in islice(losses, 3):
        float(loss)  # waits for a GPU
        ends.append(time.perf_counter())
    return judge.steps * (ends[2] - ends[0]) / 2


def _training(
    judge: Judge, model: nn.Module, train: Samples, spec: DataSpec, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Train one step for each loss that is taken."""
    generator = torch.Generator().manual_seed(seed)
    samples = train.to(device)
    endless = chain.from_iterable(
        epoch_batches(samples.labels, judge.batch_size, generator) for _ in repeat(None)
    )
    changes = chosen_changes(judge.augment, spec)
    augment = Augment(changes, torch.Generator().manual_seed(seed))
    optimizer = judge.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: judge.schedule(step / judge.steps)
    )
    for batch in endless:
        inputs, labels = samples.minibatch(batch, device)
        inputs = augmented(inputs, changes, augment.draw(len(batch), device))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        yield loss.detach()
