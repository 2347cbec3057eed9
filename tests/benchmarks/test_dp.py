"""Noise is chosen for an epsilon, a table continues where it was stopped, and can be drawn."""

import json
import math
import sys

import pytest
import torch
from opacus.accountants import RDPAccountant

from benchmarks import dp
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.settings import TrainSettings


@pytest.mark.parametrize(("samples", "batch"), [(143, 16), (6000, 300)])
def test_the_noise_of_dp_sgd_spends_the_epsilon_that_was_asked_for(samples, batch):
    settings = dp.settings_for("fedavg", 2.0, samples)
    assert settings["train.batch-size"] == batch
    trained = samples - samples // 10
    accountant = RDPAccountant()
    steps = dp.ROUNDS * TrainSettings().local_epochs * math.ceil(trained / batch)
    accountant.history = [(float(settings["train.dp-noise"]), batch / trained, steps)]
    assert accountant.get_epsilon(dp.DELTA) == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize("single_class", [False, True])
def test_each_sample_is_one_nodes_alone(single_class):
    labels = torch.as_tensor(load_dataset("digits").train.labels)
    shares = dp.spread(labels, 20, single_class, torch.Generator())
    assert sorted(torch.cat(shares).tolist()) == list(range(len(labels)))
    if single_class:
        assert all(len(torch.unique(labels[own])) == 1 for own in shares)


def test_a_table_goes_on_where_it_was_stopped_and_is_drawn_with_what_is_without_noise(
    tmp_path, monkeypatch
):
    requests = []

    def accuracy(data, epsilon, *others):
        requests.append(epsilon)
        return 0.5

    monkeypatch.setattr(dp, "virtual_accuracy", accuracy)
    stored, plot = tmp_path / "rows.json", tmp_path / "rows.svg"
    for epsilons in (["inf"], ["1", "inf"]):
        arguments = ["--only", "virtual", "--json", str(stored), "--plot", str(plot)]
        monkeypatch.setattr(sys, "argv", ["dp", *arguments, "--epsilons", *epsilons])
        dp.main()
        assert plot.read_text().count("<svg") == 1
    assert requests == [math.inf, 1.0]
    assert [row["series"] for row in json.loads(stored.read_text())] == [
        "virtual data, digits, 1 node"
    ] * 2
