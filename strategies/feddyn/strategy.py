"""FedDyn: nodes' objectives regularised dynamically, so that their optima agree."""

from collections.abc import Collection, Mapping
from typing import Any

from flwr.app import ConfigRecord
from torch import nn

from flwr_distill.protocol.arrays import Arrays, trained_names
from flwr_distill.strategies.common.averages import summed_change, weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.feddyn.method import DYNAMIC, FedDynSettings


class FedDyn(CheckedFedAvg):
    """Federated learning with dynamic regularisation (Acar et al. 2021, Algorithm 1).

    Node i adds ``-<g_i, w> + alpha/2 ||w - w_t||^2`` to its loss, and then
    ``g_i <- g_i - alpha (w_i - w_t)`` (:class:`strategies.feddyn.client.Dynamic`). The server keeps
    ``h <- h - alpha/m sum_i (w_i - w_t)`` over the participants P, m being all nodes, and takes
    ``w <- 1/|P| sum_i w_i - h / alpha``.

    Parameters
    ----------
    model : nn.Module
        The run's architecture: of its state, all but parameters is averaged.
    **kwargs
        Settings (`strategies.feddyn.method.FedDynSettings`), and what Flower's FedAvg takes.
    """

    settings: FedDynSettings = FedDynSettings()
    run_arguments = ("model",)
    state_keys = ("h",)

    def __init__(self, *, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.h: Arrays = {}
        self._trained = trained_names(model)

    def records(self) -> Mapping[str, ConfigRecord]:
        """Ask for the regulariser."""
        return {DYNAMIC: ConfigRecord(self.settings.model_dump(by_alias=True))}

    def combine(self, updates: list[Update]) -> Arrays:
        """Take the server's step."""
        models = [update.arrays for update in updates]
        mean, self.h = dynamic_step(
            self.start_of_round, models, self.h, self.settings.alpha, self.num_nodes, self._trained
        )
        return mean


def dynamic_step(
    start: Arrays,
    models: list[Arrays],
    h: Arrays,
    alpha: float,
    num_nodes: int,
    trained: Collection[str],
) -> tuple[Arrays, Arrays]:
    """The server's step of FedDyn: w_{t+1} and the new h, in float64.

    Parameters
    ----------
    start, models : Mapping[str, ndarray], list of such
        w_t, and the participants' w_i.
    h : Mapping[str, ndarray]
        The server's state; missing arrays are 0.
    num_nodes : int
        m.
    trained : collection of str
        Arrays that it concerns; the others are averaged.
    """
    mean = weighted_mean((1.0, model) for model in models)
    h_next = {}
    for name in trained:
        change = summed_change(name, start, ((1.0, model) for model in models))
        h_next[name] = h.get(name, 0.0) - alpha / num_nodes * change
        step = change / len(models) - h_next[name] / alpha
        mean[name] = (start[name] + step).astype(start[name].dtype)
    return mean, h_next
