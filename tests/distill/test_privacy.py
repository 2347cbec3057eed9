"""The privacy card tells of copies what is so, and nothing malformed is read as one."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flwr_distill.distill.privacy
from flwr_distill.distill import DistillError, VirtualDataError
from flwr_distill.distill.privacy import PrivacyCard, nearer_to_own, privacy_card
from tests.distill.builders import normal
from tests.errors import at


def draw(n, seed=0, shape=(2, 5, 3)):
    return normal(n, *shape, seed=seed)


def naive(virtual, others):
    """Least distance and highest cosine of each image, by loops in float64."""
    distances, cosines = [], []
    for v in virtual.double().flatten(1).numpy():
        pairs = list(others.double().flatten(1).numpy())
        distances.append(min(math.sqrt(np.mean((v - x) ** 2)) for x in pairs))
        cosines.append(max(v @ x / (np.linalg.norm(v) * np.linalg.norm(x)) for x in pairs))
    return np.array(distances), np.array(cosines)


@settings(max_examples=15, deadline=None)
@given(
    n=st.sampled_from([1, 3, 7]),
    m=st.integers(1, 12),
    k=st.integers(1, 12),
    chunk=st.sampled_from([1, 90, 2**24]),
    seed=st.integers(0, 1000),
)
def test_card_equals_naive_loops_whatever_the_chunks(n, m, k, chunk, seed):
    virtual, real, held_back = draw(n, seed), draw(m, seed + 1), draw(k, seed + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flwr_distill.distill.privacy, "CHUNK_FLOATS", chunk)
        card = privacy_card(virtual, real, held_back=held_back)
    assert card.yardstick is not None
    for closeness, others in [(card.own, real), (card.yardstick.held_back, held_back)]:
        distances, cosines = naive(virtual, others)
        middle = (n - 1) // 2
        expected = [distances.min(), np.sort(distances)[middle], cosines.max()]
        expected.append(np.sort(cosines)[middle])
        np.testing.assert_allclose(list(asdict(closeness).values()), expected, atol=1e-5)
    share = float(np.mean(naive(virtual, real)[0] < naive(virtual, held_back)[0]))
    assert card.yardstick.nearer_to_own == pytest.approx(share)
    assert card.yardstick.by_chance == m / (m + k)


def test_a_copy_has_distance_zero_and_cosine_one():
    real = 100 + 1e-2 * draw(50)  # differences are small against the images
    card = privacy_card(real[17:18].clone(), real)
    assert card.own.least_distance == 0
    assert card.own.highest_cosine == pytest.approx(1, abs=1e-6)


def test_yardstick_tells_copies_from_images_of_the_same_kind():
    real, held_back = draw(300, 1), draw(100, 2)
    fresh = privacy_card(draw(400, 3), real, held_back=held_back).yardstick
    copied = privacy_card(real + 0.1 * draw(300, 3), real, held_back=held_back).yardstick
    assert fresh is not None
    assert copied is not None
    assert fresh.nearer_to_own == pytest.approx(fresh.by_chance, abs=0.1)
    assert copied.nearer_to_own == 1


def test_equal_distances_count_one_half():
    real = draw(5)
    yardstick = privacy_card(draw(4, 1), real, held_back=real.clone()).yardstick
    assert yardstick is not None
    assert yardstick.nearer_to_own == 0.5


def test_who_is_alone_is_the_nearest():
    virtual, real = torch.randn(3, 1, 4, 4), torch.randn(5, 1, 4, 4)
    assert nearer_to_own(virtual, real, real[:0]) == 1
    assert nearer_to_own(virtual, real[:0], real) == 0
    assert nearer_to_own(virtual, real, real) == 0.5


def test_start_is_compared_image_by_image():
    begin = draw(3)
    virtual = begin.clone()
    virtual[1] += 1
    virtual[2] *= -1
    closeness = privacy_card(virtual, draw(9, 1), start=begin).start
    assert closeness is not None
    assert closeness.least_distance == 0
    assert closeness.median_distance == pytest.approx(1)
    assert closeness.highest_cosine == pytest.approx(1)


def test_nothing_held_back_gives_no_yardstick():
    assert privacy_card(draw(2), draw(3)).yardstick is None
    assert privacy_card(draw(2), draw(3), held_back=draw(0)).yardstick is None


def test_black_images_have_a_card():
    card = privacy_card(torch.zeros(2, 1, 4, 4), torch.zeros(3, 1, 4, 4))
    assert asdict(card.own) == {
        "least_distance": 0,
        "median_distance": 0,
        "highest_cosine": 0,
        "median_cosine": 0,
    }


def test_images_of_other_shapes_are_refused():
    with pytest.raises(DistillError, check=at("shape of real images", value=(2, 5, 3))):
        privacy_card(draw(2, shape=(1, 5, 3)), draw(3))
    with pytest.raises(DistillError, check=at("start images", value=3)):
        privacy_card(draw(2), draw(4), start=draw(3))


CARD = privacy_card(draw(4), draw(9, 1), start=draw(4, 2), held_back=draw(9, 3))


@pytest.mark.parametrize(
    "card", [CARD, replace(CARD, start=None), replace(CARD, start=None, yardstick=None)]
)
def test_card_survives_json(card):
    assert PrivacyCard.from_dict(json.loads(json.dumps(asdict(card)))) == card


def changed(path, value):
    content = asdict(CARD)
    *parents, last = path.split(".")
    part = content
    for name in parents:
        part = part[name]
    part[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (7, "privacy card"),
        ({}, "privacy card"),
        (changed("own", None), "card"),
        (changed("own.extra", 1.0), "privacy card"),
        (changed("own.least_distance", "0"), "least_distance"),
        (changed("own.least_distance", True), "least_distance"),
        (changed("own.least_distance", float("nan")), "least_distance"),
        (changed("own.least_distance", -1.0), "distances"),
        (changed("own.median_distance", 0.0), "distances"),
        (changed("start.highest_cosine", 1.5), "cosines"),
        (changed("start.median_cosine", -1.5), "cosines"),
        (changed("yardstick.nearer_to_own", 1.1), "nearer_to_own"),
        (changed("yardstick.nearer_to_own", float("nan")), "nearer_to_own"),
        (changed("yardstick.nearer_to_own", None), "nearer_to_own"),
        (changed("yardstick.by_chance", -0.1), "by_chance"),
        (changed("yardstick.held_back.median_cosine", None), "median_cosine"),
        (changed("yardstick", []), "privacy card"),
    ],
)
def test_malformed_cards_are_refused_by_name(content, where):
    with pytest.raises(VirtualDataError, check=at(where)):
        PrivacyCard.from_dict(content)
