"""CADIS: clusters of clients by what training changes, with an equal say each."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_distill.base.text import counted, listed
from flwr_distill.protocol.arrays import Arrays, as_arrays
from flwr_distill.protocol.outliers import room
from flwr_distill.strategies.cadis.method import CADISSettings
from flwr_distill.strategies.cadis.similarity import (
    KnownPairs,
    Pairs,
    aggregation_weights,
    cluster_sizes,
    clusters,
    estimated_links,
    instance_similarity,
    similarity_of_a_cluster,
    threshold,
)
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.robust import (
    agreement,
    inner_products,
    robust_mean,
    shortening,
    too_long,
)
from flwr_distill.strategies.common.topology import FlatClusters
from flwr_distill.task.errors import SettingsError


class CADIS(CheckedFedAvg):
    """Clustered aggregation and knowledge-distilled regularisation, for data skewed by cluster.

    Clients are similar if training changes the weights of their last dense layer similarly. Clients
    above a rising threshold of similarity, directly or through others, form a cluster, and client i
    weighs ``u_i ~ 1/|cluster of i| n_i/n``. Nodes keep the relations between the samples of a
    minibatch close to those of the global model (:class:`strategies.cadis.client.Relational`).

    Parameters
    ----------
    feature_layer : str (default: "")
        Name of the dense layer that is compared and whose input are the features. If empty, the
        last: the server takes the last two-dimensional array called ``*.weight``.
    seed : int (default: 0)
        Seed of the draws of transitive learning.
    **kwargs
        Settings (`strategies.cadis.method.CADISSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    Source: "CADIS: Handling Cluster-skewed Non-IID Data in Federated Learning with Clustered
    Aggregation and Knowledge DIStilled Regularization" (Nguyen et al. 2023).

    Clusters cover all clients ever seen; ``|cluster of i|`` counts only clients in the round, so
    that every cluster in it has an equal say. Unlike in the paper, it is capped (``most_say``): a
    few clients unlike all others would outweigh the rest. Nor is there an equal say where no
    cluster is large (``main_cluster``), or the regulariser before one is. Similarities of pairs
    that never met are estimated for clients of the round, through other clients of the round.

    Pairs are judged by the peak of their similarity S (eq. 12), unlike in the paper. Once a model
    fits a cluster, its clients' changes are noise and S falls: judged by S, the cluster would
    split, and each of its clients would weigh as much as a cluster.

    Settings choose the paper's rule, and that of its published code, in each of these points. That
    code also compares some clients with another client's model, which no setting does: its loop
    over pairs (i, j) pairs model i with model j - i - 1.
    """

    settings: CADISSettings = CADISSettings()
    run_arguments = ("seed", "feature_layer")

    def __init__(self, *, feature_layer: str = "", seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.feature_layer = feature_layer
        self.seed = seed
        self.places: dict[int, int] = {}
        """Index of each node ever seen."""
        self.known = KnownPairs()
        self.has_main_cluster = not self.settings.main_cluster
        """Whether the last round found a main cluster, or needed none."""
        self.topology: FlatClusters | None = None
        """Clusters as found."""
        self.last_start: Arrays = {}
        """The global model at the start of the last round, if a rule needs it."""
        self._dense: str

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> CADIS settings:")
        log(INFO, "\t│\t├── Weights by: %s", self.settings.aggregation)
        log(INFO, "\t│\t├── Regulariser: %s", self.settings.kd_lambda)
        log(INFO, "\t│\t└── Rule within clusters: %s", self.settings.rule)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train with the regulariser."""
        if self.settings.aggregation != "samples":
            self._dense = _dense_weight(as_arrays(arrays), self.feature_layer)
        # A rule rejects what turns back: without it, honest nodes with few classes do as well.
        needed = self.settings.aggregation == "samples" or self.settings.rule != "mean"
        regularised = self.has_main_cluster or needed
        weight = self.settings.kd_lambda if regularised else 0.0
        config = ConfigRecord({**config, "kd-lambda": weight, "feature-layer": self.feature_layer})
        return super().configure_train(server_round, arrays, config, grid)

    def combine(self, updates: list[Update]) -> Arrays:
        """Learn who is alike, and average with an equal say for every cluster."""
        if self.settings.rule != "mean":
            updates = self._judged(updates)
        if self.settings.aggregation == "samples":
            return super().combine(updates)
        for update in updates:
            self.places.setdefault(update.node, len(self.places))
        updates = sorted(updates, key=lambda update: self.places[update.node])
        clients = np.array([self.places[update.node] for update in updates])
        start = self.start_of_round[self._dense].astype(np.float64)
        trained = [update.arrays[self._dense].astype(np.float64) for update in updates]
        changes = np.stack([(weights - start).ravel() for weights in trained])
        self.known = self.known.after(clients, instance_similarity(changes))
        linked = self._linked(clients)
        cluster_of = clusters(len(self.places), *linked)
        self._report(cluster_of)
        largest = int(np.bincount(cluster_of).max())
        self.has_main_cluster = largest >= self.settings.main_cluster * len(self.places)
        num_examples = np.array([update.num_examples for update in updates])
        sizes = None
        if not self.has_main_cluster:
            log(INFO, "CADIS: no main cluster, so nodes weigh by their samples")
            cluster_of = np.zeros_like(cluster_of)
        else:
            seen = np.arange(len(self.places))
            counted = seen if self.settings.cluster_size == "seen" else clients
            sizes = cluster_sizes(cluster_of, linked, self.settings.closure, clients, counted)
            if self.settings.aggregation == "cluster-sizes":
                num_examples = np.ones_like(num_examples)
        most_say = self.settings.most_say
        weights = aggregation_weights(cluster_of[clients], num_examples, most_say, sizes)
        if self.settings.rule == "mean":
            return weighted_mean(zip(weights, (update.arrays for update in updates), strict=True))
        means = []
        for cluster in np.unique(cluster_of[clients]):
            inside = np.flatnonzero(cluster_of[clients] == cluster)
            models = [updates[i].arrays for i in inside]
            of_models = weights[inside].tolist()
            mean, used = robust_mean(self.settings.rule, of_models, models, self.start_of_round)
            for i in inside[used == 0]:
                self.set_aside(updates[i].reply, "it is out of line with its cluster")
            means.append((weights[inside].sum(), mean))
        return weighted_mean(means)

    def _linked(self, clients: NDArray[np.int64]) -> list[Pairs]:
        """Pairs of all clients seen that are alike enough: known ones, and estimated ones."""
        settings, server_round = self.settings, self.server_round
        by, num_clients = settings.similarity, len(self.places)
        eps = threshold(server_round, settings.eps, settings.eps_growth, settings.max_eps)
        needed = similarity_of_a_cluster(self.known.judged(by), eps, settings.rescaling)
        linked = [self.known.links(needed, by)]
        if settings.transitive != "off":
            through = np.arange(num_clients) if settings.transitive == "all" else clients
            rows, draws = self.known.rows(through, num_clients, by), [self.seed, server_round]
            generator = np.random.default_rng(draws)
            linked.append(estimated_links(rows, through, needed, generator))
        return linked

    def _judged(self, updates: list[Update]) -> list[Update]:
        """Updates moved back to a usual length, without those that turn back or are too long.

        The former point against both the last global step and most others of the round. An honest
        client whose data are unlike the others' may point against one of the two.
        """
        start, before = self.start_of_round, self.last_start
        self.last_start = start
        models = [update.arrays for update in updates]
        step = {n: np.add(w, np.subtract(w, before.get(n, w))) for n, w in start.items()}
        products = inner_products([*models, step], start)
        against, products = products[-1, :-1] < 0, products[:-1, :-1]
        turning = against & ~agreement(products)
        num_examples = np.array([update.num_examples for update in updates], dtype=np.float64)
        long = too_long(products, num_examples)
        factors = shortening(products, room(num_examples))
        judged = []
        for update, factor, turns, is_long in zip(updates, factors, turning, long, strict=True):
            if turns:
                self.set_aside(update.reply, "it points against the last step and most others")
            elif is_long:
                self.set_aside(update.reply, "its update is far longer than most")
            else:
                moved = [(factor, update.arrays), (1 - factor, start)]
                judged.append(replace(update, arrays=weighted_mean(moved)))
        return judged

    def _report(self, cluster_of: NDArray[np.int64]) -> None:
        nodes = list(self.places)  # no array of them: ids of 64 bits would become floats
        groups = tuple(
            tuple(nodes[i] for i in np.flatnonzero(cluster_of == c))
            for c in range(int(cluster_of.max()) + 1)
        )
        self.topology = FlatClusters(groups)
        sizes = listed([str(len(group)) for group in groups])
        log(INFO, "CADIS: %s in clusters of %s", counted(len(nodes), "node"), sizes)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        own = {
            "places": dict(self.places),
            "known": asdict(self.known),
            "last-start": dict(self.last_start),
            "has-main-cluster": self.has_main_cluster,
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self.places = dict(state["places"])
        self.known = KnownPairs(**state["known"])
        self.last_start = dict(state["last-start"])
        self.has_main_cluster = state["has-main-cluster"]


def _dense_weight(arrays: Arrays, layer: str) -> str:
    """Name of the weights of a model's dense layer ``layer``, or of its last."""
    dense = [n for n, array in arrays.items() if n.endswith(".weight") and array.ndim == 2]
    wanted = [name for name in dense if not layer or name == f"{layer}.weight"]
    if not wanted:
        raise SettingsError(
            f"CADIS compares a dense layer's weights, and the model has "
            f"{', '.join(dense) or 'no such layer'}",
            where="train.feature-layer",
            value=layer,
            remedy="name the layer, without .weight",
        )
    return wanted[-1]
