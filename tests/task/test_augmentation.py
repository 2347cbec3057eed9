"""Random changes of training images, against SciPy and against their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import affine_transform

from flwr_distill.task import augmentation
from flwr_distill.task.augmentation import Augment, augmented, chosen_changes
from flwr_distill.task.datasets import DataSpec, load_dataset
from flwr_distill.task.datasets.registry import _ENTRIES
from flwr_distill.task.datasets.text import text_spec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.distill.builders import seeded as generator
from tests.errors import at

SPEC = load_dataset("digits").spec
TEXTS = text_spec("some-texts", 4)


def images(n=6, shape=(3, 9, 13), seed=1):
    return torch.randn(n, *shape, generator=generator(seed))


def moved(image, numbers):
    """One channel under shift, scale, rotate, shear and flip, in pixels, by SciPy."""
    right, down, x, y, turn, skew, flip = numbers
    height, width = image.shape
    angle = math.radians(12) * turn
    matrix = np.array(
        [
            [(1 + 0.12 * y) * math.cos(angle), (1 + 0.12 * y) * math.sin(angle)],
            [0.15 * skew - (1 + 0.12 * x) * math.sin(angle), (1 + 0.12 * x) * math.cos(angle)],
        ]
    )
    offset = np.array([0.1 * height * down, 0.1 * width * right])
    if flip < 0:
        matrix[1], offset[1] = -matrix[1], -offset[1]
    middle = (np.array(image.shape) - 1) / 2
    return affine_transform(
        image, matrix, middle + offset - matrix @ middle, order=1, mode="nearest"
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.sampled_from([(1, 9, 13), (3, 8, 8), (2, 12, 5)]))
def test_all_geometry_of_an_image_is_one_affine_map_of_its_own(seed, shape):
    batch, changes = images(4, shape, seed), augmentation.GEOMETRY
    numbers = Augment(changes, generator(seed)).draw(4)
    expected = [
        [moved(channel, drawn) for channel in image]
        for image, drawn in zip(batch.double().numpy(), numbers.double().numpy(), strict=True)
    ]
    found = augmented(batch, changes, numbers)
    np.testing.assert_allclose(found.numpy(), np.array(expected), atol=2e-4)


@pytest.mark.parametrize("changes", [*((change,) for change in CHANGES), CHANGES])
def test_what_becomes_of_an_image_hangs_on_no_other(changes):
    """As differential privacy needs it."""
    numbers = Augment(changes, generator()).draw(6)
    together = augmented(images(), changes, numbers)
    for i, image in enumerate(images()):
        alone = augmented(image[None], changes, numbers[i : i + 1])
        torch.testing.assert_close(alone[0], together[i])
        assert not torch.equal(together[i], image) or (changes == ("flip",) and numbers[i] >= 0)


def test_cutout_sets_a_rectangle_of_at_most_a_quarter_of_each_side_to_the_mean():
    shape = (2, 16, 32)
    numbers = Augment(("cutout",), generator()).draw(50)
    cut = augmented(torch.ones(50, *shape), ("cutout",), numbers)[:, 0] == 0
    assert cut.any(2).sum(1).max() == 4
    assert cut.any(1).sum(1).max() == 8
    assert torch.equal(cut, cut.any(2)[:, :, None] & cut.any(1)[:, None])


def test_colour_keeps_order_within_a_channel_and_changes_level_and_contrast():
    batch = images(40, (1, 6, 6))
    coloured = augmented(batch, ("colour",), Augment(("colour",), generator()).draw(40))
    assert torch.equal(batch.flatten(1).argsort(), coloured.flatten(1).argsort())
    ratio = coloured.std((1, 2, 3)) / batch.std((1, 2, 3))
    assert ratio.min() > 0.5
    assert ratio.max() < 1.5
    assert (coloured.mean((1, 2, 3)) - batch.mean((1, 2, 3))).abs().max() < 0.5


def test_what_comes_in_from_outside_is_the_edge():
    """Digits have their background there, whatever value it has."""
    batch = torch.full((20, 1, 8, 8), -3.0)
    batch[:, :, 3:5, 3:5] = 2
    changes = ("shift", "scale", "rotate", "shear")
    changed = augmented(batch, changes, Augment(changes, generator()).draw(20))
    assert changed.min() == pytest.approx(-3)
    assert changed.max() < 2.001


def test_the_same_state_of_the_generator_gives_the_same_changes():
    first, second = generator(4), generator(4)
    draws = [Augment(CHANGES, own) for own in (first, second)]
    assert torch.equal(*(own.draw(5) for own in draws))
    assert not torch.equal(draws[0].draw(5), Augment(CHANGES, generator(4)).draw(5))


def test_auto_flips_no_digits_and_leaves_texts_and_tables_alone():
    chosen = {name: chosen_changes("auto", entry.spec) for name, entry in _ENTRIES.items()}
    flipped = {name for name, changes in chosen.items() if "flip" in changes}
    assert flipped == {"cifar10", "cifar100", "cinic10", "fashion-mnist"}
    unchanged = {name for name, changes in chosen.items() if not changes}
    assert unchanged == {"ag-news", "sst-2", "csv"}
    other = DataSpec("mine", (1, 8, 8), 2, (0.5,), (0.5,))
    assert chosen_changes("auto", other) == ("shift", "scale", "rotate", "cutout")
    assert chosen_changes("none", other) == ()


def test_named_changes_are_taken_in_one_order_whatever_the_list_s():
    for named in ("rotate,shift", "shift, rotate", "rotate,shift,rotate"):
        assert chosen_changes(TrainSettings(augment=named).augment, SPEC) == ("shift", "rotate")


def test_named_changes_of_texts_are_an_error():
    with pytest.raises(SettingsError, check=at("train.augment", value="shift")):
        chosen_changes("shift", TEXTS)


@pytest.mark.parametrize("value", ["twist", "shift;rotate", "", "none,shift", "auto,flip"])
def test_an_unknown_change_is_an_error_with_the_known_ones(value):
    with pytest.raises(SettingsError, match="shift, scale", check=at("augment", value=value)):
        TrainSettings.checked({"augment": value}, "run config")
