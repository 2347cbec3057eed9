"""Judges a training set by the accuracy of a network trained on it."""

from itertools import chain, islice, repeat

import torch

from client.training import epoch_batches, fit
from task.datasets import DataSpec, Samples
from task.evaluation import evaluate_model
from task.models import create_model

STEPS = 500
BATCH_SIZE = 64
LEARNING_RATE = 1e-3


def train_and_score(
    train: Samples,
    test: Samples,
    spec: DataSpec,
    *,
    steps: int = STEPS,
    seed: int,
    device: torch.device | str = "cpu",
) -> float:
    """Train the data set's default network and return its accuracy in [0, 1].

    Training sets of different sizes get the same initial weights and the same number of steps, not
    of epochs (Adam, learning rate 1e-3, batches of 64 or of the whole set). Labels of `train` may
    be distributions over the classes, float32 (n, classes).
    """
    model = create_model("auto", spec, seed=seed).to(device)
    generator = torch.Generator().manual_seed(seed)
    samples = train.to(device)
    endless = chain.from_iterable(
        epoch_batches(samples.labels, BATCH_SIZE, generator) for _ in repeat(None)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    fit(model, samples, islice(endless, steps), optimizer)
    return evaluate_model(model, test, device)[0]
