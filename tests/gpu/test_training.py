"""A node's and the server's training on a GPU gives what it gives on the CPU."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

import flwr_distill.client.dp_sgd
from flwr_distill.client.dp_sgd import PrivacyAccount, PrivateTraining, secret_generator
from flwr_distill.client.session import Session
from flwr_distill.client.terms import loss_terms
from flwr_distill.client.training import soft_labels, train_round
from flwr_distill.protocol.registry import all_methods
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.datasets import Samples
from flwr_distill.task.evaluation import evaluate_model
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES
from flwr_distill_baselines.common.class_means import record_of_means
from flwr_distill_baselines.fedhkd.method import FedHKDSettings
from flwr_distill_baselines.vhl.method import VHLSettings
from tests.gpu.work import ADAM, ONE_PASS, SGD, SPEC, generator

MEANS = {c: np.full(64, 0.1 * c, np.float32) for c in (1, 2)}
CHANCES = {c: np.full(10, 0.1, np.float32) for c in (1, 2)}
ASKED = {
    "kd-lambda": ("train.kd-lambda", 0.5),
    "proximal-mu": ("train.proximal-mu", 0.1),
    "dynamic-regularisation": ConfigRecord({"alpha": 0.1}),
    "model-contrast": ConfigRecord({"mu": 1.0, "temperature": 0.5}),
    "control-variate": ArrayRecord({}),
    "virtual": ConfigRecord({"per-class": 1, "first-steps": 1, "contrast": 1.0}),
    "virtual-task": ConfigRecord({**VHLSettings().model_dump(by_alias=True), "seed": 0}),
    "prototype-distance": {
        "prototype-distance": ConfigRecord({"weight": 1.0}),
        "prototypes": record_of_means(prototypes=MEANS),
    },
    "knowledge-loss": {
        "knowledge-loss": ConfigRecord(FedHKDSettings().model_dump(by_alias=True)),
        "hyper-knowledge": record_of_means(features=MEANS, predictions=CHANCES),
    },
}
"""How a message asks for each loss term: by a setting, a record, or records."""


@pytest.fixture
def node(gpu, tmp_path):
    """A node with 72 of the digits: its session, and a model on its device."""

    def make(device, **settings):
        folder = str(tmp_path / device.replace(":", ""))
        config = {"partition-id": 0, "num-partitions": 20, "state-dir": folder, "device": device}
        run_config = {"train.local-epochs": 1, **settings}
        session = Session.of(Context(1, 5, config, RecordDict(), run_config))
        return session, create_model("digits-cnn", SPEC, seed=0).to(device)

    return make


def on_cpu(tensors):
    return {name: value.cpu() for name, value in tensors.items()}


def start():
    """Weights that each training here begins with."""
    return create_model("digits-cnn", SPEC, seed=0).state_dict()


@pytest.mark.parametrize(
    "key", sorted(key for method in all_methods().values() for key in method.terms)
)
def test_every_loss_term_trains_as_on_the_cpu_and_again_with_what_it_kept(gpu, node, key):
    asked = ASKED[key]
    settings, records = (dict([asked]), {}) if isinstance(asked, tuple) else ({}, {key: asked})
    if isinstance(asked, dict) and not isinstance(asked, ConfigRecord | ArrayRecord):
        records = asked

    def two_rounds(device):
        session, model = node(device, **settings)
        numbers = []
        for _ in range(2):
            state = model.state_dict()
            model = create_model("digits-cnn", SPEC, seed=0).to(device)
            model.load_state_dict(state)
            (term,) = loss_terms(session, RecordDict(records), model, session.task.train)
            data, asked_for = session.data.train, session.task.train
            trained = train_round(model, data, asked_for, generator(), terms=[term])
            numbers.append((trained, list(term.finish(model, trained.steps))))
        return numbers, on_cpu(model.state_dict())

    (numbers, weights), (expected_numbers, expected) = two_rounds(gpu.device), two_rounds("cpu")
    gpu.check(numbers, expected_numbers, SGD)
    gpu.check(weights, expected, SGD, start())


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"balanced": True}),
        ({}, {"changes": CHANGES}),
        ({"train.optimizer": "adam"}, {"balanced": True}),
        ({"train.momentum": 0.9, "train.weight-decay": 1e-3}, {"balanced": True}),
    ],
    ids=["sgd", "random changes", "adam", "momentum"],
)
def test_every_optimiser_trains_as_on_the_cpu(gpu, node, settings, options):
    def run(device):
        session, model = node(device, **settings)
        data, asked = session.data.train, session.task.train
        trained = train_round(model, data, asked, generator(), **options)
        return trained, on_cpu(model.state_dict())

    (trained, weights), (expected_numbers, expected) = run(gpu.device), run("cpu")
    tolerance = ADAM if "train.optimizer" in settings else SGD
    gpu.check(trained, expected_numbers, tolerance)
    gpu.check(weights, expected, tolerance, start())


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_every_precision_trains_on_a_gpu(gpu, node, precision):
    """That numbers differ with it only a real GPU shows, in test_on_a_real_gpu.py."""
    session, model = node(gpu.device, **{"train.precision": precision})
    trained = train_round(model, session.data.train, session.task.train, generator())
    assert trained.loss < 5
    assert all(p.isfinite().all() for p in model.cpu().parameters())


def test_soft_labels_are_those_of_the_cpu(gpu, node):
    def run(device):
        session, model = node(device)
        auxiliary = torch.randn(6, 1, 8, 8, generator=generator(1)).to(device)
        asked = {"steps": 3, "lr": 0.1, "batch_size": 8, "generator": generator()}
        return soft_labels(model, session.data.train, auxiliary, **asked)

    gpu.check(run(gpu.device), run("cpu"), SGD)


@pytest.mark.parametrize("terms", [{}, {"train.proximal-mu": 0.1}])
def test_private_training_is_that_of_the_cpu_but_for_its_noise(gpu, node, monkeypatch, terms):
    """The noise is drawn where the model is; it is made too small to show."""

    def noise_generator(device, generator):
        return torch.Generator(device).manual_seed(0)

    monkeypatch.setattr(flwr_distill.client.dp_sgd, "_on", noise_generator)

    def run(device):
        session, model = node(device, **terms)
        unlimited = SimpleNamespace(spend=lambda *given: None)
        privacy = PrivateTraining(1e-6, 1.0, unlimited, generator())
        data, asked = session.data.train, session.task.train
        added = loss_terms(session, RecordDict(), model, asked)
        options = {"changes": CHANGES, "terms": added, "privacy": privacy}
        train_round(model, data, asked, generator(), **options)
        return on_cpu(model.state_dict())

    gpu.check(run(gpu.device), run("cpu"), SGD, start())


@pytest.mark.parametrize("terms", [{}, {"train.proximal-mu": 0.1}])
def test_private_training_runs_on_a_gpu_with_noise_that_is_drawn_there(gpu, node, tmp_path, terms):
    """The noise is another than on the CPU, so the numbers are."""
    session, model = node(gpu.device, **terms)
    account = PrivacyAccount(NodeStore(Path(tmp_path) / "spent"), 1e-5, budget=0.0)
    privacy = PrivateTraining(1.0, 1.0, account, secret_generator())
    before = on_cpu(model.state_dict())
    added = loss_terms(session, RecordDict(), model, session.task.train)
    data, asked = session.data.train, session.task.train
    train_round(model, data, asked, generator(), changes=CHANGES, terms=added, privacy=privacy)
    for name, value in model.state_dict().items():
        assert value.device == torch.device(gpu.device)
        assert value.cpu().isfinite().all()
        assert not torch.equal(value.cpu(), before[name])


def test_an_empty_poisson_sample_is_taken_on_a_gpu_too(gpu, node, tmp_path):
    session, model = node(gpu.device)
    account = PrivacyAccount(NodeStore(Path(tmp_path) / "spent"), 1e-5, budget=0.0)
    privacy = PrivateTraining(1.0, 1.0, account, generator())
    few = Samples(session.data.train.inputs[:2], session.data.train.labels[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    privacy.fit(model, few, optimizer, batch_size=1, steps=6, changes=CHANGES)


@pytest.mark.parametrize("model_name", ["resnet8", "digits-cnn"])
def test_a_model_is_evaluated_more_than_once_with_new_weights_each_time(gpu, model_name):
    """A server evaluates one model in each round, with batch normalisation too."""
    test = Samples(torch.randn(20, 1, 8, 8, generator=generator()), torch.arange(20) % 10)
    states = [create_model(model_name, SPEC, seed=seed).state_dict() for seed in (1, 2, 3)]

    def run(device):
        model, scores = create_model(model_name, SPEC, seed=0), []
        for state in states:
            model.load_state_dict(state)
            scores.append(evaluate_model(model, test, device))
        return scores

    gpu.check(run(gpu.device), run("cpu"), ONE_PASS)
