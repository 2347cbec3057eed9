"""Local training of many nodes at once, for simulations: one step for all of them.

Copies of the model are stacked along a first dimension, over which `torch.func.vmap` runs forward
and backward pass. PyTorch's SGD and Adam treat each number alone, so they take stacked weights.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from flwr_distill.client.training import Trained, epoch_batches, hard_labels, optimizer_of
from flwr_distill.protocol.meeting import one_line
from flwr_distill.task.augmentation import Augment, augmented
from flwr_distill.task.compute.precision import forward_in, products_in
from flwr_distill.task.datasets import Samples
from flwr_distill.task.settings import NO_WEIGHTS, Change, TrainSettings

Weights = dict[str, Tensor]


class _Minibatch(NamedTuple):
    """Indices of samples (n,), and numbers for their random changes (n, k), both on the CPU."""

    rows: Tensor
    numbers: Tensor


def why_one_by_one(model: nn.Module, samples: Samples, settings: TrainSettings) -> str:
    """Why nodes cannot train this model together; empty if they can.

    The model is tried on a sample, on the device that trains, and not changed.
    """
    if settings.dp_noise:
        return "differential privacy clips and adds noise for each node alone"
    if settings.class_weights != NO_WEIGHTS:
        return "the run weighs classes, for each node by its own samples"
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    if any(True for _ in model.buffers()) or trained != model.state_dict().keys():
        return "the model has more than weights to train, such as the statistics of BatchNorm"
    try:
        first = _Minibatch(torch.zeros(2, dtype=torch.int64), torch.empty(2, 0))
        _train([[first]] * 2, model, samples, settings, ())
    except RuntimeError as error:
        return f"torch.func.vmap refuses the model ({one_line(error)})"
    return ""


def train_together(
    model: nn.Module,
    sets: Sequence[Samples],
    settings: TrainSettings,
    generators: Sequence[torch.Generator],
    changes: tuple[Change, ...] = (),
) -> list[tuple[Weights, Trained]]:
    """Train for a round's local epochs on several nodes' samples, each from the same model.

    Each node's result equals that of :func:`client.training.train_round` but for rounding: it sees
    the same minibatches.

    Parameters
    ----------
    model : nn.Module
        The common start, on the device that trains; not changed. See `why_one_by_one`.
    sets : Sequence[Samples]
        Samples of each node, at least one each.
    generators : Sequence[torch.Generator]
        CPU generator of each node's order and random changes.

    Returns
    -------
    list[tuple[dict[str, Tensor], Trained]]
        Weights by name, on the CPU, and measures of each node.
    """
    starts = accumulate((len(samples) for samples in sets), initial=0)
    batches = [
        [
            _Minibatch(rows + start, numbers)
            for rows, numbers in _batches(len(samples), settings, Augment(changes, generator))
        ]
        for samples, start, generator in zip(sets, starts, generators, strict=False)
    ]
    joined = Samples(
        torch.cat([samples.inputs for samples in sets]),
        torch.cat([samples.labels for samples in sets]),
    )
    # Nodes with most steps come first, so that those still training are always the first ones.
    order = sorted(range(len(sets)), key=lambda node: -len(batches[node]))
    weights, sums = _train([batches[node] for node in order], model, joined, settings, changes)
    weights, totals = {name: weight.cpu() for name, weight in weights.items()}, sums.tolist()
    results = {}
    for place, node in enumerate(order):
        steps = len(batches[node])
        loss, accuracy = (total / max(steps, 1) for total in totals[place])
        own = {name: weight[place] for name, weight in weights.items()}
        results[node] = own, Trained(loss, accuracy, steps)
    return [results[node] for node in range(len(sets))]


def _batches(num_samples: int, settings: TrainSettings, augment: Augment) -> Iterator[_Minibatch]:
    """The minibatches that `train_round` draws."""
    labels = torch.empty(num_samples)  # only their number counts
    for _ in range(settings.local_epochs):
        for rows in epoch_batches(
            labels, settings.batch_size, augment.generator, drop_last=settings.drop_last
        ):
            yield _Minibatch(rows, augment.draw(len(rows)))


def _train(
    batches: Sequence[Sequence[_Minibatch]],
    model: nn.Module,
    samples: Samples,
    settings: TrainSettings,
    changes: tuple[Change, ...],
) -> tuple[Weights, Tensor]:
    """Train on minibatches of common samples; nodes with most steps come first.

    Returns the stacked weights, and each node's sums of loss and accuracy over its steps.
    """
    model.train()
    device = next(model.parameters()).device
    stacked = {
        name: weight.detach().expand(len(batches), *weight.shape).clone()
        for name, weight in model.named_parameters()
    }
    sums = torch.zeros(2, len(batches), device=device)
    training = [sum(len(own) > step for own in batches) for step in range(len(batches[0]))]
    by_step = [own[s] for s, active in enumerate(training) for own in batches[:active]]
    rows, shares = _padded([batch.rows for batch in by_step])
    numbers = pad_sequence([batch.numbers for batch in by_step], batch_first=True).to(device)
    parts = rows.to(samples.labels.device), shares.to(device), numbers
    of_step = zip(*(torch.split(part, training) for part in parts), strict=True)
    losses, forward = _losses(model), forward_in(settings.precision, device)
    optimizer = None
    with products_in(settings.precision):
        for active, steps in groupby(training):
            # Views: the weights of a node that has finished do not change.
            weights = {name: weight[:active].requires_grad_() for name, weight in stacked.items()}
            optimizer = _optimizer(list(weights.values()), settings, optimizer)
            for _ in steps:
                row, share, number = next(of_step)
                images, targets = samples.minibatch(row.flatten(), device)
                flat = augmented(images, changes, number.flatten(0, 1)), targets
                inputs, labels = (part.reshape(*row.shape, *part.shape[1:]) for part in flat)
                optimizer.zero_grad(set_to_none=True)
                with forward:
                    loss, right = losses(weights, inputs, labels, share)
                sums[:, :active] += torch.stack([loss.detach(), right])
                loss.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return stacked, sums.T


def _losses(model: nn.Module) -> Callable[[Weights, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Loss and accuracy of each node on its minibatch, of stacked weights."""

    def of_node(
        weights: Weights, inputs: Tensor, labels: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, weights, (inputs,))
        losses = functional.cross_entropy(logits, labels, reduction="none")
        right = (logits.argmax(1) == hard_labels(labels)).float()
        return (shares * losses).sum(), (shares * right).sum()

    return vmap(of_node)


def _padded(batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Minibatches as rows of one length, and the share of each sample in its minibatch's mean.

    Padding is a sample of the same minibatch, so that a value that is not finite stays with its
    node.
    """
    rows = pad_sequence(list(batches), batch_first=True)
    sizes = torch.tensor([len(batch) for batch in batches]).unsqueeze(1)
    real = torch.arange(rows.shape[1]) < sizes
    return torch.where(real, rows, rows[:, :1]), real / sizes


def _optimizer(
    weights: list[Tensor], settings: TrainSettings, before: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Optimizer of stacked weights; continues with the first nodes of the one before."""
    optimizer = optimizer_of(weights, settings)
    if before:
        for old, new in zip(before.param_groups[0]["params"], weights, strict=True):
            optimizer.state[new] = {
                key: value[: len(new)] if isinstance(value, Tensor) and value.ndim else value
                for key, value in before.state[old].items()
            }
    return optimizer
