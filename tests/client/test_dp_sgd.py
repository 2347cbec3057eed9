"""Differential privacy on a node, against naive DP-SGD and an integral of the privacy loss."""

import copy
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn
from torch.nn import functional

from flwr_distill.client.app import app
from flwr_distill.client.dp_sgd import (
    SPENT,
    BudgetSpentError,
    PrivacyAccount,
    PrivateTraining,
    secret_generator,
)
from flwr_distill.client.session import Session
from flwr_distill.client.terms import Proximal
from flwr_distill.client.training import soft_labels, train_round
from flwr_distill.protocol.schema import MAX_NUMBER
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.cadis.client import Relational
from flwr_distill.strategies.moon.client import ModelContrastive
from flwr_distill.strategies.moon.method import MOONSettings
from flwr_distill.task.augmentation import Augment, augmented
from flwr_distill.task.datasets import DataSpec, Samples, load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.distill.builders import seeded as generator
from tests.errors import at

DELTA = 1e-5
SPEC = load_dataset("digits").spec


@pytest.fixture
def account(tmp_path):
    return PrivacyAccount(NodeStore(tmp_path / "node"), DELTA, budget=0.0)


@pytest.fixture
def private(account):
    return PrivateTraining(noise=0.7, clip=0.5, account=account, generator=generator(3))


@pytest.fixture
def samples():
    return Samples(torch.randn(23, 1, 4, 4, generator=generator(1)), torch.arange(23) % 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3))


def naive(model, samples, *, noise, clip, rate, steps, lr, draws, mu=0.0, changes=()):
    """DP-SGD, sample by sample; mu/2 ||w - w_t||^2 joins without noise."""
    start = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    for _ in range(steps):
        chosen = (torch.rand(len(samples), generator=draws) < rate).nonzero().flatten()
        numbers = Augment(changes, draws).draw(len(chosen))
        total = [torch.zeros_like(p) for p in parameters]
        for i, own in zip(chosen, numbers, strict=True):
            image = augmented(samples.inputs[i][None], changes, own[None])
            loss = functional.cross_entropy(model(image), samples.labels[i][None])
            gradient = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
            for t, g in zip(total, gradient, strict=True):
                t += g * min(1, clip / norm)
        with torch.no_grad():
            for p, t, w in zip(parameters, total, start, strict=True):
                drawn = torch.normal(0, noise * clip, p.shape, generator=draws)
                p -= lr * ((t + drawn) / (rate * len(samples)) + mu * (p - w))


@pytest.mark.parametrize("mu", [0.0, 0.8])
@pytest.mark.parametrize("batch_size", [1, 8, 50])
def test_steps_are_those_of_dp_sgd_sample_by_sample(private, samples, model, batch_size, mu):
    """With a batch size of 1 some Poisson samples are empty; of 50, all are the whole set."""
    twin = copy.deepcopy(model)
    rate = 1 / math.ceil(23 / batch_size)
    terms = [Proximal(model, mu)] if mu else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    private.fit(model, samples, optimizer, batch_size=batch_size, steps=6, terms=terms)
    asked = {"noise": 0.7, "clip": 0.5, "rate": rate, "steps": 6, "lr": 0.3}
    naive(twin, samples, draws=generator(3), mu=mu, **asked)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_each_sample_of_a_step_is_changed_by_itself_with_secret_numbers(private, samples, model):
    twin = copy.deepcopy(model)
    settings = TrainSettings(local_epochs=2, batch_size=8, lr=0.3, dp_noise=0.7)
    train_round(model, samples, settings, generator(9), changes=CHANGES, privacy=private)
    asked = {"noise": 0.7, "clip": 0.5, "rate": 1 / 3, "steps": 6, "lr": 0.3}
    naive(twin, samples, draws=generator(3), changes=CHANGES, **asked)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_no_one_knows_the_masks_of_dropout(account, samples, model):
    """They were torch's own, of 32 bits: with these, one sample less moved a step by 7 clips."""
    model = nn.Sequential(*model[:-1], nn.Dropout(), *model[-1:])
    private = PrivateTraining(noise=1e-9, clip=1.0, account=account, generator=generator(3))
    trained = []
    for _ in range(2):
        twin = copy.deepcopy(model)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        private.fit(twin, samples, optimizer, batch_size=len(samples), steps=1)
        assert torch.equal(torch.get_rng_state(), before)
        trained.append(twin[1].weight)
    assert (trained[0] - trained[1]).norm() > 0.01


def test_one_sample_moves_a_step_by_no_more_than_the_clip(account, model):
    """Without noise, and with a sample whose gradient is far above the clip."""
    moved = []
    for n in (6, 5):
        inputs = torch.randn(6, 1, 4, 4, generator=generator(2))
        inputs[5] *= 1e4
        twin = copy.deepcopy(model)
        training = PrivateTraining(1e-9, 0.5, account, generator())
        samples = Samples(inputs[:n], torch.zeros(n).long())
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        training.fit(twin, samples, optimizer, batch_size=6, steps=1)
        before = torch.nn.utils.parameters_to_vector(model.parameters())
        moved.append((before - torch.nn.utils.parameters_to_vector(twin.parameters())) * n)
    assert 0.4 < float((moved[0] - moved[1]).norm()) < 0.5001


def test_a_sample_whose_gradient_is_not_a_number_moves_a_step_by_nothing(account):
    """Or a model that only a certain sample makes infinite would tell whether that is here."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.constant_(model[1].weight, 1e20)
    inputs = torch.randn(6, 1, 4, 4, generator=generator(2))
    inputs[5] = 1e20
    assert model(inputs).isfinite().all(1).tolist() == [True] * 5 + [False]
    before, moved = model[1].bias.detach().clone(), []
    for n in (6, 5):
        twin, samples = copy.deepcopy(model), Samples(inputs[:n], torch.zeros(n).long())
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        training = PrivateTraining(1e-9, 0.5, account, generator())
        training.fit(twin, samples, optimizer, batch_size=6, steps=1)
        moved.append((before - twin[1].bias.detach()) * n)
    assert moved[1].abs().max() > 0.1
    torch.testing.assert_close(moved[0], moved[1])


def test_a_round_s_steps_and_rate_are_those_of_its_epochs_and_batches(private, samples, model):
    train = TrainSettings(local_epochs=2, batch_size=8, dp_noise=0.7)
    trained = train_round(model, samples, train, generator(), privacy=private)
    assert (trained.loss, trained.accuracy, trained.steps) == (None, None, 6)
    assert trained.numbers() == {"num-steps": 6}
    kept = json.loads(private.account.store.read(SPENT))
    assert kept == {"history": [[0.7, pytest.approx(1 / 3), 6]], "mechanism": "rdp"}


def renyi_epsilon(noise, rate, steps, delta=DELTA):
    """epsilon by integrating ((1-q) + q p1/p0)^alpha p0 (Mironov et al. 2019), then Balle et al."""
    x = np.linspace(-60, 90, 300_001) * max(noise, 1)
    log_p0 = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(
        math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + (2 * x - 1) / (2 * noise**2)
    )
    best = math.inf
    for alpha in [1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 63]:
        log_terms = alpha * log_ratio + log_p0
        top = log_terms.max()
        moment = top + math.log(np.exp(log_terms - top).sum() * (x[1] - x[0]))
        epsilon = steps * moment / (alpha - 1) + math.log1p(-1 / alpha)
        best = min(best, epsilon - math.log(delta * alpha) / (alpha - 1))
    return best


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.0, 0.1, 60), (0.8, 1.0, 5), (2.0, 0.5, 100), (1.5, 0.02, 400)]
)
def test_epsilon_is_that_of_an_integral_of_the_privacy_loss(account, noise, rate, steps):
    account.spend(noise, rate, steps)
    expected = renyi_epsilon(noise, rate, steps)
    # the accountant tries more orders, so it may be a little lower, never higher
    assert 0.95 * expected < account.epsilon < 1.001 * expected


def gaussian_delta(epsilon, apart):
    """Delta of two normal distributions so many deviations apart (Balle and Wang 2018, eq. 6)."""
    first, second = norm.logcdf([apart / 2 - epsilon / apart, -apart / 2 - epsilon / apart])
    return math.exp(first) - math.exp(epsilon + second)


@settings(deadline=None)
@given(st.floats(0.5, 20), st.integers(1, 30), st.integers(1, 5000))
def test_a_groups_epsilon_is_near_and_not_below_that_of_the_gaussian_mechanism(
    tmp_path_factory, noise, steps, size
):
    account = PrivacyAccount(NodeStore(tmp_path_factory.mktemp("store")), DELTA, 0.0)
    account.spend(noise, rate=1.0, steps=steps)
    bound, apart = account.epsilon_of_group(size), size * math.sqrt(steps) / noise
    assert gaussian_delta(bound, apart) <= DELTA
    assert gaussian_delta(0.5 * bound, apart) > DELTA


def test_an_epsilon_beyond_all_bounds_fits_into_a_reply(account):
    account.spend(1e-3, rate=1.0, steps=100)
    assert account.numbers(10**6)["dp-epsilon-of-all"] == MAX_NUMBER


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 5), st.floats(0.05, 1), st.integers(1, 20)), max_size=4))
def test_what_is_spent_adds_up_over_restarts_and_never_falls(tmp_path_factory, spendings):
    store = NodeStore(tmp_path_factory.mktemp("store"))
    last = 0.0
    for spending in spendings:
        restarted = PrivacyAccount(store.at(None), DELTA, 0.0)
        restarted.spend(*spending)
        assert restarted.epsilon > last
        last = restarted.epsilon


def test_what_was_spent_outlasts_the_rounds_of_the_store(account):
    for server_round in range(1, 5):
        of_round = PrivacyAccount(account.store.at(server_round).at(None), DELTA, 0.0)
        of_round.spend(1.0, 0.1, 10)
    assert json.loads(account.store.read(SPENT))["history"] == [[1.0, 0.1, 40]]


def test_a_budget_is_never_exceeded_and_what_is_refused_is_not_booked(account):
    account.spend(1.0, 0.1, 10)
    spent = account.epsilon
    limited = PrivacyAccount(account.store, DELTA, budget=spent + 0.01)
    with pytest.raises(BudgetSpentError, check=at("train.dp-epsilon")):
        limited.spend(1.0, 0.1, 100)
    assert limited.epsilon == spent


def test_an_account_that_cannot_be_read_does_not_begin_anew(account):
    account.store.write(SPENT, b"torn")
    with pytest.raises(ValueError, match="Expecting value"):
        account.spend(1.0, 0.1, 1)
    assert account.store.read(SPENT) == b"torn"


def test_the_same_generator_state_gives_the_same_model_bit_for_bit(account, samples, model):
    twin = copy.deepcopy(model)
    for of in (model, twin):
        training = PrivateTraining(1.0, 1.0, account, generator(5))
        optimizer = torch.optim.Adam(of.parameters())
        training.fit(of, samples, optimizer, batch_size=8, steps=4)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_secret_generator_draws_from_all_of_its_624_words(monkeypatch):
    words = np.random.default_rng(0).integers(0, 2**32, 624)
    draw = iter(words.tolist())
    monkeypatch.setattr("flwr_distill.client.dp_sgd.secrets.randbits", lambda bits: next(draw))
    drawn = torch.randint(0, 2**16, (2000,), generator=secret_generator())
    twister = np.random.MT19937()
    state = {"key": words.astype(np.uint32), "pos": 624}
    twister.state = {"bit_generator": "MT19937", "state": state}
    monkeypatch.undo()
    assert drawn.tolist() == (twister.random_raw(2000) % 2**16).tolist()
    assert not torch.equal(secret_generator().get_state(), secret_generator().get_state())


def test_a_term_of_each_sample_is_clipped_with_the_cross_entropy(private, samples, tmp_path):
    """MOON: its gradient, however large its weight, stays within the clip."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))
    context = Context(1, 5, {"partition-id": 0, "num-partitions": 9}, RecordDict(), {})
    moon = ModelContrastive(Session.of(context), model, MOONSettings(mu=1e6, temperature=0.5))
    for p in model.parameters():
        p.data += 0.1
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    quiet = PrivateTraining(1e-9, 0.5, private.account, generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    quiet.fit(model, samples, optimizer, batch_size=50, steps=1, terms=[moon])
    moved = nn.utils.parameters_to_vector(model.parameters()) - before
    assert 0 < float(moved.norm()) <= 0.5001


def test_terms_that_mix_samples_are_refused_and_nothing_is_spent(private, samples, model):
    optimizer, terms = torch.optim.SGD(model.parameters()), [Relational(model, 1.0)]
    with pytest.raises(SettingsError, match="Relational", check=at("train.dp-noise", value=0.7)):
        private.fit(model, samples, optimizer, batch_size=8, steps=1, terms=terms)
    assert private.account.epsilon == 0


def test_a_model_with_batch_norm_or_lstm_is_refused_with_the_remedy(private, samples):
    texts = DataSpec("texts", (7,), 3, (0.0,), (1.0,), "text", vocabulary=50)
    for model in (create_model("resnet8", SPEC), create_model("bilstm", texts)):
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(SettingsError, match="layer", check=at("train.dp-noise", value=0.7)):
            private.fit(model, samples, optimizer, batch_size=8, steps=1)


@pytest.mark.parametrize("name", ["digits-cnn", "convnet3-gn32", "mlp"])
def test_models_without_batch_norm_train(private, name):
    model, images = create_model(name, SPEC), torch.randn(5, 1, 8, 8, generator=generator())
    samples = Samples(images, torch.arange(5))
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private.fit(model, samples, optimizer, batch_size=2, steps=2)
    after = nn.utils.parameters_to_vector(model.parameters())
    assert after.isfinite().all()
    assert not torch.equal(before, after)


def test_even_classes_are_refused(private, samples, model):
    with pytest.raises(SettingsError, check=at("hfldd.balanced", value=True)):
        train_round(model, samples, TrainSettings(), generator(), balanced=True, privacy=private)


def test_label_knowledge_is_booked(private, samples, model):
    auxiliary = torch.randn(4, 1, 4, 4, generator=generator())
    asked = {"steps": 10, "lr": 0.01, "batch_size": 64}
    soft_labels(model, samples, auxiliary, generator=generator(), privacy=private, **asked)
    assert json.loads(private.account.store.read(SPENT))["history"] == [[0.7, 1.0, 10]]


# The ClientApp


@pytest.fixture
def node(tmp_path):
    told = {"partition-id": 0, "num-partitions": 20, "state-dir": str(tmp_path), "device": "cpu"}

    def ask(kind, content, run_id=1, **run_config):
        config = {"train.dp-noise": 1.0, "train.local-epochs": 1} | run_config
        message = Message(RecordDict(content), 5, kind)
        message.metadata.__dict__["_message_id"] = "1"
        return app(message, Context(run_id, 5, told, RecordDict(), config)).content

    return ask


def training(**config):
    arrays = ArrayRecord(create_model("auto", SPEC, seed=0).state_dict())
    return {"config": ConfigRecord(config), "arrays": arrays}


PRIVATE_METRICS = {"num-examples", "num-steps", "dp-epsilon", "dp-epsilon-of-all", "dp-delta"}


def test_a_node_reports_a_growing_epsilon_and_neither_loss_nor_accuracy(node):
    first, second = (node("train", training())["metrics"] for _ in range(2))
    assert first.keys() == PRIVATE_METRICS
    assert 0 < first["dp-epsilon"] < second["dp-epsilon"]


def test_a_run_s_seed_does_not_tell_the_noise(node):
    """The same message, node and round give other models, since the server knows those three."""
    first, second = (node("train", training())["arrays"]["0.weight"].numpy() for _ in range(2))
    assert abs(first - second).max() > 1e-4


def test_without_noise_nothing_of_privacy_is_said_or_kept(node, tmp_path):
    reply = node("train", training(), **{"train.dp-noise": 0.0})["metrics"]
    assert reply.keys() == {"num-examples", "num-steps", "train-loss", "train-accuracy"}
    assert not list(tmp_path.rglob(SPENT))


def test_a_node_whose_budget_is_spent_trains_no_further(node):
    with pytest.raises(BudgetSpentError, check=at("train.dp-epsilon", value=1.0)):
        node("train", training(), **{"train.dp-epsilon": 1.0})


def resumed(node, run_id, before):
    """Have the node continue with another run after its round 0."""
    told = {"run-id": str(before), "node-id": "5", "round": 0}
    node("query.continue_run", {"config": ConfigRecord(told)}, run_id)


def test_runs_that_were_resumed_from_one_share_its_account_and_its_budget(node):
    def spent(run_id, budget=0.0):
        asked = {"train.batch-size": 128, "train.dp-epsilon": budget}
        return node("train", training(), run_id, **asked)["metrics"]["dp-epsilon"]

    once, twice = spent(run_id=9), spent(run_id=9)
    assert spent(run_id=1) == once
    resumed(node, 2, before=1)
    resumed(node, 3, before=1)  # from the same checkpoint again
    resumed(node, 4, before=3)
    assert spent(run_id=2, budget=twice) == twice
    for run_id in (1, 2, 3, 4):
        with pytest.raises(BudgetSpentError):
            spent(run_id, budget=twice)
    assert spent(run_id=5, budget=twice) == once


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        ("train.distill", {"config": ConfigRecord()}, "hfldd.dp-epsilon"),
        (
            "train.virtual",
            training() | {"virtual": ConfigRecord({"per-class": 1, "first-steps": 1})},
            "virtual data",
        ),
        ("train.distill_sector", training(**{"server-round": 1}), "FedHEAD"),
    ],
)
def test_what_has_no_differential_privacy_is_refused(node, kind, content, complaint):
    refusal = at("train.dp-noise", value=1.0)
    with pytest.raises(SettingsError, match=complaint, check=refusal):
        node(kind, content)


def test_a_budget_without_noise_is_refused():
    with pytest.raises(SettingsError, match=r"train\.dp-noise"):
        TrainSettings.checked({"dp-epsilon": 3.0}, "run config")


def test_opacus_leaves_the_root_logger_alone_so_that_no_line_is_printed_twice():
    code = (
        "import logging; "
        "from flwr_distill.distill.private_matching import noise_for;"
        "from flwr_distill.task.models import why_not_private; from torch import nn;"
        "noise_for(1.0, 1e-5), why_not_private(nn.Linear(1, 1)); print(logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
