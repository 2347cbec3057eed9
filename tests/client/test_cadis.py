"""CADIS's regulariser against the paper's equations as loops."""

import copy
import math

import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flwr_distill.client.terms import loss_terms
from flwr_distill.client.training import train_round
from flwr_distill.strategies.cadis.client import Relational, log_relations
from flwr_distill.task.datasets import Samples
from flwr_distill.task.settings import TrainSettings


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))


def naive_relations(features):
    n = len(features)
    squared = [
        [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in features] for x in features
    ]
    variance = sum(map(sum, squared)) / (n * (n - 1))
    kernel = [[math.exp(-d / (2 * variance)) for d in row] for row in squared]
    return [
        [kernel[i][j] / sum(kernel[i][k] for k in range(n) if k != i) for j in range(n)]
        for i in range(n)
    ]


def published_relations(features):
    """The published code's kernel density, in loops."""
    n = len(features)
    d = [[math.dist(x, y) for y in features] for x in features]
    pairs = [d[i][j] for i in range(n) for j in range(n) if i != j]
    mean = sum(pairs) / len(pairs)
    variance = sum((x - mean) ** 2 for x in pairs) / (len(pairs) - 1)
    kernel = [[math.exp(-((x - mean) ** 2) / (2 * (variance + 0.001))) for x in row] for row in d]
    return [
        [kernel[i][j] / sum(kernel[i][k] for k in range(n) if k != i) for j in range(n)]
        for i in range(n)
    ]


RELATIONS = {"gaussian": naive_relations, "centred": published_relations}


def term_on(term, model, inputs):
    return term(inputs, torch.zeros(len(inputs), dtype=torch.int64), model(inputs))


@pytest.mark.parametrize("kernel", RELATIONS)
@given(n=st.integers(3, 8), seed=st.integers(0, 1000))
def test_the_term_is_lambda_times_the_papers_divergence(kernel, n, seed):
    model = mlp()
    term, teacher = Relational(model, 0.7, kernel=kernel), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    inputs = torch.randn(n, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    relations = RELATIONS[kernel]
    p_t, p_s = (relations(m[:3](inputs).double().tolist()) for m in (teacher, model))
    divergence = sum(
        p_t[i][j] * math.log(p_t[i][j] / p_s[i][j]) for i in range(n) for j in range(n) if i != j
    )
    assert term_on(term, model, inputs).item() == pytest.approx(0.7 * divergence, abs=1e-4)


def test_it_is_zero_at_the_global_model_and_positive_elsewhere():
    model, inputs = mlp(), torch.randn(8, 1, 3, 3)
    term = Relational(model, 1.0)
    assert term_on(term, model, inputs).item() == pytest.approx(0, abs=1e-6)
    model.load_state_dict(mlp(seed=1).state_dict())
    assert term_on(term, model, inputs).item() > 1e-3


def test_its_gradient_leads_back_to_the_global_models_relations():
    model, inputs = mlp(), torch.randn(16, 1, 3, 3)
    term = Relational(model, 1.0)
    model.load_state_dict(mlp(seed=1).state_dict())
    before = term_on(term, model, inputs).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        term_on(term, model, inputs).backward()
        optimizer.step()
    assert term_on(term, model, inputs).item() < 0.5 * before


def test_relations_do_not_depend_on_the_scale_of_features():
    features = torch.randn(6, 4)
    torch.testing.assert_close(log_relations(1000 * features), log_relations(features))


@pytest.mark.parametrize("kernel", RELATIONS)
@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_samples_have_no_relations_to_keep(n, kernel):
    model = mlp()
    term = Relational(model, 1.0, kernel=kernel)
    model.load_state_dict(mlp(seed=1).state_dict())
    value = term_on(term, model, torch.randn(n, 1, 3, 3))
    value.backward()
    assert value.item() == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kernel", RELATIONS)
@pytest.mark.parametrize("constant", [0.0, 1e8, 0.1])
def test_constant_features_have_equal_relations_and_no_gradient(constant, kernel):
    features = torch.full((5, 4), constant, requires_grad=True)
    relations = log_relations(features, kernel)
    torch.testing.assert_close(relations, torch.full((5, 4), -math.log(4)))
    relations[0, 0].backward()
    assert torch.equal(features.grad, torch.zeros(5, 4))


def test_a_teacher_is_in_evaluation_mode_and_stays_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    term, before = Relational(model, 1.0), copy.deepcopy(model.state_dict())
    samples = Samples(torch.randn(12, 1, 3, 3), torch.arange(12) % 3)
    train_round(
        model, samples, TrainSettings(batch_size=4), torch.Generator().manual_seed(0), terms=[term]
    )
    for name, value in term._teacher.state_dict().items():
        assert torch.equal(value, before[name])
    assert not torch.equal(model.state_dict()["1.weight"], before["1.weight"])


def test_any_strategys_config_can_ask_for_it_and_it_is_off_by_default():
    asked = TrainSettings.checked({"kd-lambda": 0.5}, "message")
    (term,) = loss_terms(None, RecordDict(), mlp(), asked)
    assert isinstance(term, Relational)
    assert loss_terms(None, RecordDict(), mlp(), TrainSettings()) == []


@pytest.mark.parametrize("kernel", RELATIONS)
def test_the_kernel_is_that_of_the_settings(kernel):
    asked = TrainSettings.checked({"kd-lambda": 1.0, "kd-kernel": kernel}, "message")
    model, inputs = mlp(), torch.randn(6, 1, 3, 3)
    (term,), expected = (
        loss_terms(None, RecordDict(), model, asked),
        Relational(model, 1.0, kernel=kernel),
    )
    model.load_state_dict(mlp(seed=1).state_dict())
    assert term_on(term, model, inputs).item() == term_on(expected, model, inputs).item()
