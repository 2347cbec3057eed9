"""The audit's attacks: equal to plain formulas, blind where nothing leaks, strong where it does."""

import numpy as np
import pytest
import torch

from flwr_distill.distill.attacks import (
    ATTACKS,
    FOLDS,
    INVERSION_RIDGE,
    attack_scores,
    learned_log_odds,
    shares_by_least_squares,
    shares_by_shadows,
)
from flwr_distill.distill.audit import (
    Finding,
    Setting,
    attack,
    distilled_halves,
    findings,
    strongest,
)
from flwr_distill.distill.membership import Curve, Interval, auc
from tests.distill.builders import seeded


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def halves_of(sets, n):
    halves = torch.rand(sets, n, generator=seeded(1)) < 0.5
    halves[:, 0] |= ~halves.any(1)
    return halves


def test_shares_are_those_of_ridge_regression_in_the_space_of_features():
    real, means = drawn(6, 9), drawn(4, 9, seed=2)
    ridge = INVERSION_RIDGE * real.square().sum(1).mean()
    wide = torch.cat([real.mT, ridge**0.5 * torch.eye(6, dtype=torch.float64)])
    seen = torch.cat([means.mT, torch.zeros(6, 4, dtype=torch.float64)])
    expected = torch.linalg.lstsq(wide, seen).solution.mT
    torch.testing.assert_close(shares_by_least_squares(real, means), expected)


def test_shares_by_shadows_are_the_posterior_mean_by_the_errors_of_other_folds():
    sets, n, d = 24, 6, 9
    real, members = drawn(n, d), halves_of(sets, n)
    true = members.double() @ real / members.sum(1, keepdim=True)
    means = true + 0.3 * drawn(sets, d, seed=2)
    shares = shares_by_shadows(real, means, members)
    for tested in (0, 13):
        others = np.arange(sets) % FOLDS != tested % FOLDS
        errors = (means - true)[others]
        middle = errors.mean(0)
        covariance = (errors - middle).mT @ (errors - middle) / len(errors)
        covariance += torch.eye(d) * covariance.diagonal().mean() + real.mT @ real / n**2
        expected = real / n @ torch.linalg.solve(covariance, means[tested] - middle)
        torch.testing.assert_close(shares[tested], expected)


def test_nothing_learned_of_a_set_depends_on_its_own_membership():
    real, means, members = drawn(6, 9), drawn(16, 9, seed=2), halves_of(16, 6)
    others = members.clone()
    others[3] = ~others[3]
    for learn in (
        lambda own: shares_by_shadows(real, means, own),
        lambda own: learned_log_odds(means, own),
    ):
        assert torch.equal(learn(members)[3], learn(others)[3])
        assert not torch.equal(learn(members)[4], learn(others)[4])


def pixels(images):
    return images.flatten(1)


def test_of_two_versions_inversion_finds_more_than_of_one():
    """Each has the members' mean, and an error of its own."""
    images, labels = drawn(60, 1, 8, 8).float(), torch.zeros(60, dtype=torch.int64)
    members = halves_of(48, 60)
    mean = members.float() @ images.flatten(1) / members.sum(1, keepdim=True)
    versions = mean.reshape(1, 48, 1, 1, 8, 8) + 0.05 * drawn(3, 48, 1, 1, 8, 8, seed=3).float()

    def found(versions):
        networks = [pixels] * (len(versions) - 1)
        scores = attack_scores(
            images, labels, members.numpy(), versions, labels[:1], num_classes=2, networks=networks
        )
        own = scores[ATTACKS.index("inversion by shadows")]
        return auc(members.numpy().ravel(), own.ravel())

    assert found(versions) > found(versions[:1]) + 0.05


def test_where_virtual_data_tell_nothing_each_attack_guesses():
    images, labels = drawn(40, 1, 8, 8).float(), torch.arange(40) % 2
    members = halves_of(64, 40).numpy()
    virtual = drawn(2, 64, 4, 1, 8, 8, seed=3).float()
    of = torch.tensor([0, 0, 1, 1])
    scores = attack_scores(images, labels, members, virtual, of, num_classes=2, networks=[pixels])
    assert len(scores) == len(ATTACKS)
    for name, own in zip(ATTACKS, scores, strict=True):
        assert auc(members.ravel(), own.ravel()) == pytest.approx(0.5, abs=0.04), name


def test_of_few_images_inversion_finds_what_nearness_does_not():
    """Means of features tell the images that they are of: the attack that the table once missed."""
    images, labels = drawn(80, 1, 8, 8).float(), torch.arange(80) % 2
    setting = Setting("dm", "class-stats", 8, steps=120)
    asked = {"num_classes": 2, "sets": 24, "canaries": 0, "seed": 0}
    halves = distilled_halves(images, labels, setting, **asked)
    found = {own.attack: own for own in findings(attack(halves, num_classes=2, seed=0))}
    by_nearness = found["nearest image"].curve.auc.value
    assert by_nearness < 0.9
    assert found["inversion by shadows"].curve.auc.value > 0.97


def test_the_audit_is_the_strongest_attack_in_each_number():
    def one(name, values, worst):
        return Finding(
            name, Curve(*(Interval(x, x, x) for x in values)), {"strange": Interval(worst, 0, 1)}
        )

    first, second = one("first", (0.6, 0.3, 0.1), 0.2), one("second", (0.7, 0.2, 0.0), 0.9)
    best = strongest([first, second])
    assert best.attack == "first"
    assert [own.value for own in best.curve] == [0.7, 0.3, 0.1]
    assert best.worst["strange"].value == 0.9
