"""Training on a node's samples: minibatches, the local optimisation of a round, soft labels."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from flwr_distill.client.class_weights import class_weights, mean_loss
from flwr_distill.client.dp_sgd import PrivateTraining
from flwr_distill.client.terms import LossTerm, value_of
from flwr_distill.protocol.messages import NUM_STEPS, TRAIN_ACCURACY, TRAIN_LOSS
from flwr_distill.task.augmentation import Augment, augmented
from flwr_distill.task.compute.cuda_graph import graphed
from flwr_distill.task.compute.memory_format import in_fast_format
from flwr_distill.task.compute.precision import forward_in, products_in
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import outputs
from flwr_distill.task.settings import BALANCED, Change, Precision, TrainSettings


class Trained(NamedTuple):
    """Mean cross-entropy and accuracy over the steps; None with DP, as they leak samples."""

    loss: float | None
    accuracy: float | None
    steps: int

    def numbers(self) -> dict[str, float]:
        """The known values, as metrics of a reply."""
        known = {TRAIN_LOSS: self.loss, TRAIN_ACCURACY: self.accuracy, NUM_STEPS: self.steps}
        return {name: value for name, value in known.items() if value is not None}


def epoch_batches(
    labels: Tensor,
    batch_size: int,
    generator: torch.Generator,
    *,
    balanced: bool = False,
    drop_last: bool = False,
) -> Iterator[Tensor]:
    """Yield the minibatches of one epoch as index tensors.

    Parameters
    ----------
    labels : Tensor
        int64 (n,), or soft labels (n, num_classes), whose likeliest class counts.
    batch_size : int
        A remainder of one sample is dropped, because batch normalisation cannot train on it,
        unless there is only that.
    generator : torch.Generator
        On the CPU.
    balanced : bool (default: False)
        If True, draw at least n samples with replacement with equally likely classes, in whole
        minibatches: a step on few samples can spoil a model, and a round may end with it. Else
        every sample comes once, in random order.
    drop_last : bool (default: False)
        If True, any remainder is dropped, unless there is only that.
    """
    num_samples = len(labels)
    if balanced:
        present, positions = hard_labels(labels).cpu().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        share = 1.0 / torch.bincount(positions, minlength=len(present)).double()
        draws = math.ceil(num_samples / batch_size) * batch_size
        order = torch.multinomial(share[positions], draws, replacement=True, generator=generator)
    else:
        order = torch.randperm(num_samples, generator=generator)
        remainder = num_samples % batch_size
        if remainder < num_samples and (drop_last or remainder == 1):
            order = order[: num_samples - remainder]
    return iter(torch.split(order.to(labels.device), batch_size))


def hard_labels(labels: Tensor) -> Tensor:
    """Class of each sample; the likeliest one of soft labels (n, num_classes)."""
    return labels.argmax(1) if labels.ndim == 2 else labels


def fit(
    model: nn.Module,
    samples: Samples,
    batches: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    terms: Sequence[LossTerm] = (),
    precision: Precision = "float32",
    augment: Augment | None = None,
    weights: Tensor | None = None,
) -> Trained:
    """Train the model in place, one step per minibatch, on the cross-entropy and the loss terms.

    Parameters
    ----------
    batches : Iterable[Tensor]
        Indices into ``samples``, one tensor per step.
    terms : Sequence[LossTerm] (default: ())
        Not part of the loss returned.
    precision : str (default: "float32")
        Of the forward pass; see :func:`task.compute.precision.forward_in`.
    augment : Augment, optional (default: None)
        Changes the images of each minibatch, also for the loss terms.
    weights : Tensor, optional (default: None)
        Of classes in the cross-entropy, by label; the loss returned has them, too.
    """
    model.train()
    device = next(model.parameters()).device
    total, right = torch.zeros(2, device=device)
    forward = forward_in(precision, device)

    def step(inputs: Tensor, labels: Tensor, *numbers: Tensor) -> None:
        if augment:
            inputs = augmented(inputs, augment.changes, *numbers)
        inputs = inputs.contiguous(memory_format=memory_format)
        optimizer.zero_grad(set_to_none=True)
        with forward:
            logits = model(inputs)
            loss = mean_loss(logits, labels, weights)
            total.add_(loss.detach())
            right.add_((logits.argmax(1) == hard_labels(labels)).float().mean())
            for term in terms:
                loss = loss + value_of(term, inputs, labels, logits)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    # Terms and Adam keep numbers in Python, which a recorded step would not change.
    recordable = not terms and isinstance(optimizer, torch.optim.SGD)
    take_step = graphed(step, device) if recordable else step
    steps = 0
    with in_fast_format(model) as memory_format:
        for batch in batches:
            numbers = (augment.draw(len(batch), device),) if augment else ()
            take_step(*samples.minibatch(batch, device), *numbers)
            steps += 1
    return Trained(float(total) / max(steps, 1), float(right) / max(steps, 1), steps)


def train_round(
    model: nn.Module,
    samples: Samples,
    settings: TrainSettings,
    generator: torch.Generator,
    *,
    balanced: bool = False,
    average_last: float = 0.0,
    changes: tuple[Change, ...] = (),
    terms: Sequence[LossTerm] = (),
    privacy: PrivateTraining | None = None,
) -> Trained:
    """Train for a round's local epochs; see :func:`fit`.

    Parameters
    ----------
    generator : torch.Generator
        On the CPU; of the order, and of random changes.
    balanced : bool (default: False)
        Whether classes are drawn evenly, which needs no balanced weights; a SettingsError with
        `privacy`.
    average_last : float (default: 0.0)
        Share of the steps, the last ones, over which the weights are averaged; 0 takes the weights
        of the last step. Not with `privacy`.
    changes : tuple[str, ...] (default: ())
        Random changes of the images; see :func:`task.augmentation.chosen_changes`.
    privacy : PrivateTraining, optional (default: None)
        Trains with differential privacy and its own random draws.
    """
    optimizer = optimizer_of(model.parameters(), settings)
    even = balanced and settings.class_weights == BALANCED
    weights = None if even else class_weights(settings.class_weights, samples.labels)
    if weights is not None:
        weights = weights.to(next(model.parameters()).device)
    if privacy is not None:
        if balanced:
            raise SettingsError(
                "samples of rare classes would come more often than differential privacy counts",
                where="hfldd.balanced",
                value=True,
                remedy="set it to false, or train.dp-noise to 0",
            )
        size = settings.batch_size
        steps = settings.local_epochs * math.ceil(len(samples) / size)
        privacy.fit(
            model,
            samples,
            optimizer,
            batch_size=size,
            steps=steps,
            changes=changes,
            terms=terms,
            weights=weights,
        )
        return Trained(None, None, steps)
    batches = chain.from_iterable(
        epoch_batches(
            samples.labels,
            settings.batch_size,
            generator,
            balanced=balanced,
            drop_last=settings.drop_last,
        )
        for _ in range(settings.local_epochs)
    )
    augment = Augment(changes, generator) if changes else None
    how = (terms, settings.precision, augment, weights)
    with products_in(settings.precision), _normalised_in_batches(samples, settings):
        if not average_last:
            return fit(model, samples, batches, optimizer, *how)
        mean, known = AveragedModel(model), list(batches)
        watched = _averaging(known, model, mean, round(len(known) * (1 - average_last)))
        trained = fit(model, samples, watched, optimizer, *how)
    with torch.no_grad():
        for weight, averaged in zip(model.parameters(), mean.module.parameters(), strict=True):
            weight.copy_(averaged)
    return trained


@contextmanager
def _normalised_in_batches(samples: Samples, settings: TrainSettings) -> Iterator[None]:
    """Name what makes minibatches of one sample, where batch normalisation refuses these."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        problem = "batch normalisation cannot train on a minibatch of one sample"
        if settings.batch_size == 1:
            raise SettingsError(
                problem, where="train.batch-size", value=1, remedy="set it to 2 or more"
            ) from error
        if len(samples) > 1:
            raise
        raise SettingsError(
            f"{problem}, and this node trains on one",
            where="model",
            remedy="give the node more samples, or normalise by groups: nn.GroupNorm",
        ) from error


def _averaging(
    batches: Sequence[Tensor], model: nn.Module, mean: AveragedModel, first: int
) -> Iterator[Tensor]:
    """Pass on minibatches; add the weights to the mean after each step from `first` on."""
    for number, batch in enumerate(batches, 1):
        yield batch
        if number > min(first, len(batches) - 1):
            mean.update_parameters(model)


def optimizer_of(weights: Iterable[Tensor], settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(weights, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        weights, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def soft_labels(
    model: nn.Module,
    samples: Samples,
    auxiliary: Tensor,
    *,
    steps: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
    privacy: PrivateTraining | None = None,
) -> Tensor:
    """Soft labels on the auxiliary set after a few steps on the node's data (HFLDD, step 1).

    Parameters
    ----------
    model : nn.Module
        The initial model, the same on every node; trained in place.
    auxiliary : Tensor
        The global auxiliary set D_g, (|D_g|, C, H, W).
    steps : int
        E_1, SGD steps.

    Returns
    -------
    Tensor
        S_i: softmax outputs, float32 (|D_g|, classes), on the CPU.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if privacy is not None:
        privacy.fit(model, samples, optimizer, batch_size=batch_size, steps=steps)
    else:
        endless = chain.from_iterable(
            epoch_batches(samples.labels, batch_size, generator) for _ in repeat(None)
        )
        fit(model, samples, islice(endless, steps), optimizer)
    return functional.softmax(outputs(model.eval(), auxiliary, auxiliary.device), dim=1).cpu()
