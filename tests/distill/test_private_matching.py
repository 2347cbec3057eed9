"""Distribution matching under differential privacy: what it takes of the images, how noisily."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from flwr_distill.distill import DistillError, private_matching
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import real_means
from flwr_distill.distill.features import RandomConvNet
from flwr_distill.distill.privacy import Guarantee, PrivacyCard
from flwr_distill.distill.private_matching import (
    UnitFeatures,
    distill_dm_privately,
    noise_for,
    noisy_means,
)
from flwr_distill.distill.virtual_data import VirtualData
from tests.distill.builders import normal, seeded
from tests.errors import at


def draw(n, seed=0):
    return normal(n, 1, 8, 8, seed=seed)


def unit_features(seed=0):
    generator = seeded(seed)
    network = RandomConvNet.draw(1, 8, 16, generator)
    return UnitFeatures(network, network(draw(20, seed + 1)).mean(0))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.floats(1e-3, 1e4))
def test_an_image_more_or_less_moves_the_sum_of_features_by_at_most_one(seed, n, scale):
    """By exactly 1 where its features are not those of noise: the noise is for this and no less."""
    generator = seeded(seed)
    features, augment = unit_features(seed), draw_augmentation(8, 8, generator)
    images = scale * draw(n + 1, seed)
    with_it = features(augment(images)).sum(0)
    without = features(augment(images[:-1])).sum(0)
    assert float((with_it - without).norm()) == pytest.approx(1, abs=1e-4)


def test_means_have_noise_of_the_multiplier_over_each_class_s_count():
    features, augment = unit_features(), draw_augmentation(8, 8, seeded())
    images, counts, noise = draw(50), [40, 10], 1.7
    exact = real_means(features, augment, images, counts)
    draws = seeded()
    noisy = [noisy_means(features, augment, images, counts, noise, draws) for _ in range(200)]
    errors = torch.stack(noisy) - exact
    for c, count in enumerate(counts):
        assert float(errors[:, c].std()) == pytest.approx(noise / count, rel=0.03)
        assert float(errors[:, c].mean().abs()) < 0.04 * noise / count
    correlation = np.corrcoef(errors[:, 0].flatten().numpy(), errors[:, 1].flatten().numpy())[0, 1]
    assert abs(correlation) < 0.04


def exact_delta(epsilon, noise):
    """Of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, theorem 8)."""
    first = norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(first - math.exp(epsilon) * norm.cdf(-1 / (2 * noise) - epsilon * noise))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 10.0])
def test_the_noise_suffices_by_the_exact_formula_and_is_little_more(epsilon):
    noise = noise_for(epsilon, 1e-5)
    assert exact_delta(epsilon, noise) <= 1e-5
    assert exact_delta(epsilon, 0.85 * noise) > 1e-5


@pytest.mark.parametrize(("formation", "side"), [(1, 8), (2, 16)])
def test_the_features_of_all_networks_are_one_release_with_noise_for_their_norm(
    monkeypatch, formation, side
):
    """An image moves each network's sum by 1, all side by side by the root of their number."""
    noises = []

    def spy(network, augment, images, counts, *rest):
        assert images.shape[-2:] == (8, 8)  # as networks see small images
        noises.append(rest[0])

    monkeypatch.setattr(private_matching, "noisy_means", spy)
    monkeypatch.setattr(private_matching, "match_means", lambda *_, **__: None)
    images = normal(12, 1, side, side)
    distil(images, torch.arange(12) % 3, epsilon=2.0, formation=formation)
    norm_of_all = math.sqrt(len(noises))
    assert noises == pytest.approx([noise_for(2.0, 1e-5) * norm_of_all] * private_matching.BANK)


PIXELS = torch.full((1, 1, 1), -0.5), torch.full((1, 1, 1), 2.0)


def distil(images, labels, noise_seed=7, epsilon=10.0, formation=1):
    return distill_dm_privately(
        images,
        labels,
        num_classes=5,
        per_class=2,
        pixels=PIXELS,
        steps=4,
        generator=seeded(1),
        noise_generator=seeded(noise_seed),
        epsilon=epsilon,
        delta=1e-5,
        formation=formation,
    )


@pytest.mark.parametrize("formation", [1, 2])
def test_virtual_pixels_stay_within_what_is_public_whatever_the_images_hold(formation):
    made = distil(50 * draw(12), torch.arange(12) % 3, formation=formation).images
    assert made.shape == (6, 1, 8, 8)
    assert (made >= -0.5).all()
    assert (made <= 2).all()
    assert float(made.amax() - made.amin()) > 2


def test_nothing_but_noisy_means_is_taken_from_the_images(monkeypatch):
    """Where they are replaced, other images of the same classes and counts give the same result."""
    monkeypatch.setattr(
        private_matching,
        "noisy_means",
        lambda network, augment, images, counts, noise, generator: torch.zeros(len(counts), 256),
    )
    labels = torch.arange(12) % 3
    one, two = (distil(images, labels) for images in (draw(12), 5 + 3 * draw(12, seed=9)))
    assert torch.equal(one.images, two.images)
    assert one.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert (one.init, one.initial_images) == ("noise", None)


def test_each_class_s_means_are_of_its_own_images(monkeypatch):
    """Images come in any order of classes."""
    seen = []

    def spy(_, augment, images, counts, *rest):
        seen.append((images, counts))
        return torch.zeros(len(counts), 256)

    monkeypatch.setattr(private_matching, "noisy_means", spy)
    images, labels = draw(9), torch.tensor([4, 1, 4, 1, 1, 4, 4, 4, 1])
    distil(images, labels)
    expected = torch.cat([images[labels == 1], images[labels == 4]])
    assert len(seen) == private_matching.BANK
    assert all(torch.equal(given, expected) and counts == [4, 5] for given, counts in seen)


def test_noise_is_of_its_own_generator_and_its_seed_does_not_travel():
    images, labels = draw(12), torch.arange(12) % 3
    one, again, other = (distil(images, labels, noise_seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    assert one.seed == other.seed == 1


def test_the_card_travels_with_the_guarantee_and_without_likeness():
    sent = distil(draw(12), torch.arange(12) % 3, epsilon=3.0)
    card = VirtualData.from_bytes(sent.to_bytes()).card
    assert card == PrivacyCard(guarantee=Guarantee(3.0, 1e-5))
    assert card is not None
    assert card.numbers() == {"virtual-epsilon": 3}


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_a_guarantee_that_is_none_is_refused(epsilon, delta):
    card = PrivacyCard(guarantee=Guarantee(1.0, 1e-5))
    content = asdict(card) | {"guarantee": {"epsilon": epsilon, "delta": delta}}
    with pytest.raises(DistillError, check=at("epsilon" if epsilon <= 0 else "delta")):
        PrivacyCard.from_dict(content)


def test_inputs_that_no_distiller_can_use_are_refused():
    with pytest.raises(DistillError, check=at("labels", value=(0, 5))):
        distil(draw(3), torch.tensor([0, 1, 5]))
