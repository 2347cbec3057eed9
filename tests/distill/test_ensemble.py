"""Ensemble distillation against naive loops, and early stopping."""

import math

import pytest
import torch
from torch import nn

from flwr_distill.distill.ensemble import distil_ensemble, saving, teacher_probabilities
from flwr_distill.distill.errors import DistillError
from tests.distill.builders import normal, seeded
from tests.errors import at


def small_model(seed, features=6, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))


INPUTS = normal(50, 6, seed=1)
MEMBERS = [(0.5, small_model(1)), (2.0, small_model(2)), (0.25, small_model(3))]


def uniform(size, classes=3):
    return torch.full((size, classes), 1 / classes)


def test_what_a_teacher_saves_is_its_share_of_the_students_cross_entropy():
    labels = torch.arange(50) % 3
    teacher, student = teacher_probabilities(MEMBERS, INPUTS), small_model(4)

    def loss(probabilities):
        rows = zip(probabilities.tolist(), labels.tolist(), strict=True)
        return -sum(math.log(row[label]) for row, label in rows) / 50

    own = loss(student(INPUTS).softmax(1))
    expected = 1 - loss(teacher) / own
    assert saving(teacher, student, INPUTS, labels) == pytest.approx(expected, abs=1e-5)
    assert saving(student(INPUTS).softmax(1).detach(), student, INPUTS, labels) == pytest.approx(
        0, abs=1e-6
    )
    sure = torch.nn.functional.one_hot(labels, 3).float()
    assert saving(sure, student, INPUTS, labels) == pytest.approx(1)
    assert math.isfinite(saving(1 - sure, student, INPUTS, labels))


def test_members_are_taken_one_at_a_time():
    alive = 0

    def load():
        nonlocal alive
        for seed, (weight, _) in enumerate(MEMBERS, 1):
            alive += 1
            assert alive == 1
            yield weight, small_model(seed)
            alive -= 1

    torch.testing.assert_close(
        teacher_probabilities(load(), INPUTS), teacher_probabilities(MEMBERS, INPUTS)
    )


def naive_adam(model, inputs, teacher, batches, lr, weight_decay):
    """Adam (Kingma and Ba 2015, algorithm 1) with an L2 penalty on -sum_c t_c log s_c."""
    parameters = list(model.parameters())
    first = [torch.zeros_like(p) for p in parameters]
    second = [torch.zeros_like(p) for p in parameters]
    for step, batch in enumerate(batches, 1):
        loss = 0.0
        for i in batch.tolist():
            log_s = model(inputs[i][None]).log_softmax(dim=1)[0]
            loss = loss - (teacher[i] * log_s).sum() / len(batch)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                g = g + weight_decay * p
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.999**step)
                p.sub_(lr * m_hat / (v_hat.sqrt() + 1e-8))


def test_distillation_steps_equal_a_naive_loop():
    teacher = teacher_probabilities(MEMBERS, INPUTS)
    student, expected = small_model(9), small_model(9)
    report = distil_ensemble(
        student, INPUTS, teacher, epochs=2, batch_size=16, lr=0.002, generator=seeded(5)
    )
    assert report.best_epoch == report.epochs == 2
    draws = seeded(5)
    training = torch.randperm(50, generator=draws)[5:]
    batches = []
    for _ in range(2):
        order = training[torch.randperm(45, generator=draws)]
        batches += [order[:16], order[16:32], order[32:]]
    naive_adam(expected, INPUTS, teacher, batches, lr=0.002, weight_decay=1e-4)
    for found, wanted in zip(student.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_training_stops_after_patience_epochs_and_the_best_student_is_returned():
    """Random targets cannot be generalised: the held-out loss soon rises."""
    teacher = torch.rand(50, 3, generator=seeded(2)).pow(8)
    teacher = teacher / teacher.sum(dim=1, keepdim=True)

    def run(epochs):
        student = small_model(9)
        settings = {"lr": 0.05, "patience": 3, "generator": seeded(4)}
        return student, distil_ensemble(student, INPUTS, teacher, epochs=epochs, **settings)

    student, report = run(500)
    assert report.epochs == report.best_epoch + 3 < 500
    until_best, _ = run(report.best_epoch)
    for found, wanted in zip(student.parameters(), until_best.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_without_restoring_the_student_is_that_of_the_epoch_in_which_training_stopped():
    teacher = torch.rand(50, 3, generator=seeded(2)).pow(8)
    teacher = teacher / teacher.sum(dim=1, keepdim=True)

    def run(**settings):
        student = small_model(9)
        report = distil_ensemble(
            student, INPUTS, teacher, lr=0.05, generator=seeded(4), **settings
        )
        return student, report

    restored, best = run(epochs=500, patience=3)
    student, report = run(epochs=500, patience=3, restore_best=False)
    assert report.best_epoch == report.epochs == best.epochs == best.best_epoch + 3
    assert report.loss > best.loss
    never_stopped, _ = run(epochs=report.epochs, patience=500, restore_best=False)
    pairs = zip(student.parameters(), never_stopped.parameters(), strict=True)
    assert all(torch.equal(found, wanted) for found, wanted in pairs)
    assert not torch.equal(student[0].weight, restored[0].weight)


def test_a_student_that_only_gets_worse_is_returned_as_it_came():
    teacher = teacher_probabilities([(1.0, small_model(9))], INPUTS)
    student = small_model(9)
    report = distil_ensemble(student, INPUTS, teacher, lr=1.0, generator=seeded())
    assert (report.best_epoch, report.epochs) == (0, 5)
    for found, wanted in zip(student.parameters(), small_model(9).parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_batch_norm_statistics_belong_to_the_kept_student():
    def with_norm():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    student = with_norm()
    distil_ensemble(student, INPUTS, uniform(50), epochs=0, generator=seeded())
    assert torch.equal(student[0].running_mean, torch.zeros(6))
    assert not student.training
    settings = {"epochs": 2, "batch_size": 4, "generator": seeded()}
    report = distil_ensemble(student, INPUTS, uniform(50), **settings)  # 45 = 11 * 4 + 1
    assert report.best_epoch > 0
    assert student[0].num_batches_tracked == 11 * report.best_epoch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_leader_with_next_to_no_data_still_distils(size):
    report = distil_ensemble(
        small_model(1), INPUTS[:size], uniform(size), epochs=2, generator=seeded()
    )
    assert math.isfinite(report.loss)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_the_teacher_is_the_weighted_or_trimmed_mean_of_the_members(average, cut):
    members = [(1.0, small_model(seed)) for seed in range(5)] if cut else MEMBERS
    teacher = teacher_probabilities(members, INPUTS, average=average, cut=cut)
    for x, row in zip(INPUTS, teacher.tolist(), strict=True):
        logits = [(weight, model(x[None])[0]) for weight, model in members]
        outputs = [(w, z if average == "logits" else z.softmax(0)) for w, z in logits]
        by_class = [sorted((float(z[c]), w) for w, z in outputs) for c in range(3)]
        kept = [pairs[cut : len(pairs) - cut] for pairs in by_class]
        means = [sum(z * w for z, w in pairs) / sum(w for _, w in pairs) for pairs in kept]
        weights = [math.exp(mean) for mean in means] if average == "logits" else means
        assert row == pytest.approx([w / sum(weights) for w in weights], abs=1e-6)


def test_nothing_to_distil_from_or_on_is_refused():
    with pytest.raises(DistillError, match="member"):
        teacher_probabilities([], INPUTS)
    with pytest.raises(DistillError, check=at("cut", value=1)):
        teacher_probabilities(MEMBERS[:2], INPUTS, cut=1)
    with pytest.raises(DistillError, match="sample"):
        teacher_probabilities(MEMBERS, INPUTS[:0])
    with pytest.raises(DistillError, check=at("teacher's outputs", value=49)):
        distil_ensemble(small_model(1), INPUTS, uniform(49), generator=seeded())
