"""What all systems train, and how they report it; imported in other projects' environments too."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SAMPLES, BATCH, CLASSES, LEARNING_RATE = 50, 10, 10, 0.01
STEPS = SAMPLES // BATCH
"""Of a client in a round: one epoch."""
SHAPE = (3, 32, 32)
_VARIABLE = "FLWR_DISTILL_PEERS"


@dataclass(frozen=True)
class Work:
    """A simulation that a system is to run.

    Parameters
    ----------
    clients, a_round : int
        Clients, and how many of them train in a round.
    rounds : int
        Number of rounds.
    folder : str
        For files of the run.
    """

    clients: int
    a_round: int
    rounds: int
    folder: str

    @classmethod
    def of_this_process(cls) -> Work:
        """Read what the harness put into the environment, which all child processes inherit."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    def environment(self) -> dict[str, str]:
        """Environment variables for a system."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @property
    def log(self) -> Path:
        """File to which a system adds a line for each round."""
        return Path(self.folder) / "rounds.jsonl"


class RoundLog:
    """Adds a line of JSON as a round ends: time, steps, and the largest change of a weight.

    Parameters
    ----------
    work : Work
        What is run.
    weights : Iterable[Tensor]
        Of the initial model.
    """

    def __init__(self, work: Work, weights: Iterable[Tensor]) -> None:
        self._file = work.log
        self._last = _flat(weights)

    def round_ended(self, weights: Iterable[Tensor], steps: int) -> None:
        """Call with the new central model, and the steps of all clients in this round."""
        last, self._last = self._last, _flat(weights)
        change = float((self._last - last).abs().max())
        with self._file.open("a") as file:
            file.write(json.dumps({"at": time.time(), "steps": steps, "change": change}) + "\n")


def _flat(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in weights])


@cache
def pixels(clients: int) -> tuple[Tensor, Tensor]:
    """Random images (uint8) and labels of each client."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (clients, SAMPLES, *SHAPE), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, (clients, SAMPLES))
    return torch.from_numpy(images), torch.from_numpy(labels)


def cores() -> int:
    """Cores of this process."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def samples(clients: int, client: int) -> tuple[Tensor, Tensor]:
    """Images in [-1, 1] and labels of a client; takes 0.05 ms."""
    images, labels = pixels(clients)
    return images[client].float().div_(127.5).sub_(1), labels[client]


def train_epoch(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Train in shuffled batches; return the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = torch.split(torch.randperm(SAMPLES), BATCH)
    for batch in batches:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(images[batch]), labels[batch]))
        optimizer.step()
    return len(batches)


def network() -> nn.Sequential:
    """Two convolutions and a hidden layer: 26 thousand weights, the same each time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 15),
            nn.ReLU(),
            nn.Linear(15, CLASSES),
        )
