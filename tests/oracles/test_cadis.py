"""CADIS against an independent reading of the paper."""

import json

import numpy as np
import pytest

from flwr_distill.strategies.cadis.similarity import instance_similarity, transitive_similarity
from flwr_distill.task.datasets import load_dataset

from . import cadis
from .federation import ROUNDING, Federation, distance, features, network

CLIENTS = (
    *((1, 6, 21), (0, 1, 37), (0, 1, 40), (0, 1, 43)),
    *((4, 5, 37), (4, 5, 41), (4, 6, 21), (4, 5, 43)),
)
"""Two classes of each client, and its samples of each: two clusters, and two clients beside."""
LR, EPOCHS, LAMBDA, EPS, GROWTH, MAX_EPS = 0.05, 2, 0.1, 0.75, 1.02, 0.795
SMALL = {
    "min_nodes": len(CLIENTS),
    "fraction_train": 0.5,
    "partition__scheme": "index-file",
    "partition__clusters": "",
    "train__lr": LR,
    "train__local_epochs": EPOCHS,
    "cadis__kd_lambda": LAMBDA,
    "cadis__eps": EPS,
    "cadis__eps_growth": GROWTH,
    "cadis__max_eps": MAX_EPS,
}


def partition(folder):
    """A partition file by `CLIENTS`."""
    labels = load_dataset("digits").train.labels
    of_class = {c: iter(np.flatnonzero(labels == c).tolist()) for c in range(10)}
    samples = {
        i: [next(of_class[c]) for c in classes for _ in range(size)]
        for i, (*classes, size) in enumerate(CLIENTS)
    }
    (folder / "clients.json").write_text(json.dumps(samples))
    return str(folder / "clients.json")


def noting(participants):
    """Wrap nodes, and note which of them train, by round."""

    def wrap(place, node):
        def answer(message):
            if message.metadata.message_type == "train":
                server_round = message.content["config"]["server-round"]
                participants.setdefault(server_round, []).append(place)
            return node(message)

        return answer

    return wrap


@pytest.mark.parametrize(("kernel", "closure"), [("gaussian", "none"), ("centred", "one-step")])
def test_five_rounds_are_those_of_the_paper(kernel, closure, tmp_path):
    chosen = {"train__kd_kernel": kernel, "cadis__closure": closure}
    own = {**SMALL, **chosen, "partition__index_file": partition(tmp_path)}
    federation, participants = Federation(tmp_path, "cadis-mnist", len(CLIENTS), **own), {}
    found, nodes = federation.run(noting(participants)), federation.sessions
    data = [(node.data.train.inputs, node.data.train.labels) for node in nodes]
    hyper = {
        **{"lr": LR, "epochs": EPOCHS, "batch_size": federation.config["train.batch-size"]},
        **{"lambda": LAMBDA, "kernel": getattr(cadis, kernel)},
        **{"eps": EPS, "growth": GROWTH, "max_eps": MAX_EPS, "max_sigma": 0.02},
        "closure": cadis.one_step if closure == "one-step" else dict,
    }
    assert any(len(n) % hyper["batch_size"] for n, _ in data)
    f, start = network(), federation.start
    with_features = lambda w, x: (f(w, x), features(w, x))  # noqa: E731
    server, estimates = cadis.Server(with_features, start, "output.weight", data, hyper), []
    for t in range(1, 6):
        draws = np.random.default_rng([0, t])

        def normal(mean, deviation, draws=draws):
            estimates.append(draws.normal(mean, deviation))
            return estimates[-1]

        server.round(participants[t], lambda i, t=t: nodes[i].generator("train", t), normal)
    assert estimates
    assert distance(found, server.w) < ROUNDING


def test_estimates_of_pairs_that_never_met_are_those_of_the_paper():
    """Of 15 clients: the mean and the deviation of each estimate, by all who know both."""
    rng = np.random.default_rng(0)
    similarity = instance_similarity(rng.normal(size=(3, 40)).repeat(5, 0))
    similarity -= 0.015 * rng.random(similarity.shape)
    met = np.triu(rng.random(similarity.shape) < 0.6, 1)
    mean = {(i, j): similarity[min(i, j), max(i, j)] for i, j in np.argwhere(met | met.T).tolist()}
    rows = np.full(similarity.shape, np.nan)
    for (i, j), s in mean.items():
        rows[i, j] = s
    pairs, means, deviations = transitive_similarity(rows, np.arange(15))
    expected = cadis.estimates(mean, range(15), 0.02, lambda *normal: normal)
    normals = zip(means, deviations, strict=True)
    found = dict(zip(zip(*np.array(pairs).tolist(), strict=True), normals, strict=True))
    assert len(found) > 3
    assert {*found, *((j, i) for i, j in found)} == expected.keys()
    assert all(normal == pytest.approx(expected[pair]) for pair, normal in found.items())
