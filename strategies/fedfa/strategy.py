"""FedFA: weights from training accuracy and participation, and momentum on nodes and server."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from flwr_distill.protocol.arrays import Arrays, trained_names
from flwr_distill.protocol.messages import TRAIN_ACCURACY
from flwr_distill.protocol.replies import number
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.fedfa.method import FedFASettings

MIN_SHARE = 1e-6


class FedFA(CheckedFedAvg):
    """Fairness and accuracy in federated learning (Huang et al. 2020).

    Node i weighs ``(1 - beta) A_i + beta F_i``. A_i is the information ``-log2(a_i / sum_j a_j)``
    of its training accuracy a_i; F_i is ``-log2(1 - f_i / sum_j f_j)`` of f_i, the rounds it took
    part in; both are divided by their sums over the participants. Nodes train with momentum gamma.
    So does the server: with w' the weighted mean, ``m <- gamma m + (1 - gamma) (w - w')`` and
    ``w <- w' - server_lr m``.

    Parameters
    ----------
    model : nn.Module
        The run's architecture: of its state, only parameters have momentum.
    **kwargs
        Settings (`strategies.fedfa.method.FedFASettings`), and what Flower's FedAvg takes.

    Notes
    -----
    The paper's accuracy is read as that of a node's minibatches while it trains. Shares are kept
    between 1e-6 and 1 - 1e-6, so that a single participant, or one with accuracy 0, has a weight.
    CADIS's published code, which compares with FedFA, takes beta 1, so that participation alone
    counts, and gamma 0. It adds the server's momentum with the opposite sign, times the learning
    rate; ``server_lr`` is ours.
    """

    settings: FedFASettings = FedFASettings()
    run_arguments = ("model",)
    state_keys = ("rounds", "m")

    def __init__(self, *, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds: dict[int, int] = {}
        """f_i, rounds that each node took part in."""
        self.m: dict[str, NDArray[np.float64]] = {}
        """The server's momentum; what is missing is 0."""
        self._trained = trained_names(model)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train with momentum gamma."""
        config["momentum"] = self.settings.gamma
        return super().configure_train(server_round, arrays, config, grid)

    def read(self, reply: Message) -> Update:
        """Read a reply, which must have the accuracy."""
        if not 0 <= (accuracy := number(reply, TRAIN_ACCURACY)) <= 1:
            raise ValueError(f"its training accuracy is {accuracy}")
        return super().read(reply)

    def combine(self, updates: list[Update]) -> Arrays:
        """Take the weighted mean, and a step along the server's momentum."""
        for update in updates:
            self.rounds[update.node] = self.rounds.get(update.node, 0) + 1
        weights = information_weights(
            np.array([number(update.reply, TRAIN_ACCURACY) for update in updates]),
            np.array([self.rounds[update.node] for update in updates]),
            self.settings.beta,
        )
        mean = weighted_mean(zip(weights, (u.arrays for u in updates), strict=True))
        gamma = self.settings.gamma
        for name in self._trained:
            reached = mean[name].astype(np.float64)
            gradient = self.start_of_round[name].astype(np.float64) - reached
            self.m[name] = gamma * self.m.get(name, 0.0) + (1 - gamma) * gradient
            step = self.settings.server_lr * self.m[name]
            mean[name] = (reached - step).astype(mean[name].dtype)
        return mean


def information_weights(
    accuracies: NDArray[np.float64], rounds: NDArray[np.int64], beta: float
) -> NDArray[np.float64]:
    """FedFA's weights of participants, which sum to 1, of a_i in [0, 1] and f_i >= 1."""
    by_accuracy = _information(accuracies / (accuracies.sum() or 1.0))
    by_rounds = _information(1 - rounds / rounds.sum())
    return (1 - beta) * by_accuracy + beta * by_rounds


def _information(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    bits = -np.log2(shares.clip(MIN_SHARE, 1 - MIN_SHARE))
    normalised: NDArray[np.float64] = bits / bits.sum()
    return normalised
