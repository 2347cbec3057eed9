"""FedNova: averages of normalised local updates."""

import math
from collections.abc import Collection, Iterable
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import nn

from flwr_distill.protocol.arrays import Arrays, trained_names
from flwr_distill.protocol.messages import NUM_STEPS
from flwr_distill.protocol.replies import number
from flwr_distill.strategies.common.averages import summed_change, weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError


class FedNova(CheckedFedAvg):
    """FedAvg in which nodes that take more local steps do not weigh more (Wang et al. 2020).

    With tau_i local steps of node i and p_i its share of the samples,
    ``w <- w - tau_eff sum_i p_i (w - w_i) / tau_i`` with ``tau_eff = sum_i p_i tau_i`` (eq. 6-8):
    plain SGD's normalisation, so nodes are to train without momentum.

    A node reports tau_i; samples that count (``most-samples``), epochs and minibatch bound it. From
    below, since a claim of a single step would multiply its update; in tau_eff also from above,
    since thousands would multiply everybody's.

    Parameters
    ----------
    model : nn.Module
        The run's architecture: of its state, all but parameters is averaged.
    **kwargs
        As Flower's FedAvg takes them.
    """

    run_arguments = ("model",)

    def __init__(self, *, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._trained = trained_names(model)
        self._config = ConfigRecord()

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; SettingsError unless it has plain SGD."""
        if run.train.optimizer != "sgd" or run.train.momentum:
            raise SettingsError(
                "FedNova divides updates by the steps of plain SGD",
                where=f"train.optimizer = {run.train.optimizer!r}, train.momentum",
                value=run.train.momentum,
                remedy="set sgd and 0",
            )
        return super().from_run(settings, run, **arguments)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train, as FedAvg does."""
        self._config = config
        return super().configure_train(server_round, arrays, config, grid)

    def read(self, reply: Message) -> Update:
        """Read a reply, which must have the number of steps."""
        if (steps := number(reply, NUM_STEPS)) <= 0:
            raise ValueError(f"it was trained for {steps} steps")
        return super().read(reply)

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the updates, each divided by its steps."""
        return normalised_average(
            self.start_of_round,
            [update.arrays for update in updates],
            [update.num_examples for update in updates],
            [self._steps(update) for update in updates],
            self._trained,
        )

    def _steps(self, update: Update) -> tuple[float, float]:
        """tau_i, and what counts of it in tau_eff; a last minibatch may be dropped."""
        steps = number(update.reply, NUM_STEPS)
        epochs, size = self._config.get("local-epochs"), self._config.get("batch-size")
        if not isinstance(epochs, int) or not isinstance(size, int):
            return steps, steps  # the server did not say how to train
        minibatches = update.num_examples / size
        steps = max(steps, epochs * max(1, math.floor(minibatches)))
        return steps, min(steps, epochs * math.ceil(minibatches))


def normalised_average(
    start: Arrays,
    models: list[Arrays],
    num_examples: list[float],
    steps: list[tuple[float, float]],
    trained: Collection[str],
) -> Arrays:
    """Average models by FedNova's rule (eq. 6-8).

    Parameters
    ----------
    start, models : Mapping[str, ndarray], list of such
        w, and the w_i.
    num_examples : list of float
        n_i, all > 0.
    steps : list of (float, float)
        tau_i, and what counts of it in tau_eff (the same, in the paper); all > 0.
    trained : collection of str
        Arrays that it concerns; the others are averaged by n_i.
    """
    mean = weighted_mean(zip(num_examples, models, strict=True))
    shares = np.array(num_examples) / sum(num_examples)
    own, in_effective = np.array(steps).T
    factors = (shares @ in_effective) * shares / own
    for name in trained:
        change = summed_change(name, start, zip(factors, models, strict=True))
        mean[name] = (start[name] + change).astype(start[name].dtype)
    return mean
