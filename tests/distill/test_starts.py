"""Starts tell of the real images what their names say, and no more."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.distill import DistillError
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.starts import smoothed, start
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.errors import SettingsError
from tests.distill.builders import normal, seeded
from tests.errors import at

LABELS = torch.tensor([4, 1] * 50)
NOISE = normal(100, 2, 6, 5)
IMAGES = 3 * NOISE + LABELS[:, None, None, None]


def test_images_are_sorted_by_class_with_the_number_asked_for():
    images, labels = start("noise", IMAGES, LABELS, 3, torch.Generator())
    assert images.shape == (6, 2, 6, 5)
    assert labels.tolist() == [1, 1, 1, 4, 4, 4]


def test_pixel_stats_follow_each_pixel():
    images, labels = start("pixel-stats", IMAGES, LABELS, 4000, seeded(1))
    drawn, real = images[labels == 1], IMAGES[LABELS.eq(1)]
    torch.testing.assert_close(drawn.mean(0), real.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(drawn.std(0), real.std(0, correction=0), atol=0.25, rtol=0)


@pytest.mark.parametrize("shape", [(16, 16), (28, 28), (24, 40)])
def test_amplitude_of_smooth_noise_falls_as_the_frequency_grows(shape):
    noise = smoothed(normal(2000, *shape))
    amplitude = torch.fft.fft2(noise).abs().mean(0)
    for across in (True, False):
        line = amplitude[0] if across else amplitude[:, 0]
        along = line[1 : len(line) // 2]
        falls = along * torch.arange(1, len(along) + 1)
        torch.testing.assert_close(falls / falls.mean(), torch.ones(len(along)), atol=0.1, rtol=0)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("formation", [1, 2])
def test_class_stats_are_one_mean_and_deviation_of_a_class_in_its_size(formation, smooth):
    generator = seeded(1)
    images, labels = start("class-stats", IMAGES, LABELS, 2000, generator, formation, smooth=smooth)
    assert images.shape == (4000, 2, 6, 5)
    tiles = Formation.of(formation, images.shape)
    for c in (1, 4):
        drawn, real = images[labels == c], tiles.tiled(IMAGES[LABELS.eq(c)])
        torch.testing.assert_close(drawn.mean(), real.mean(), atol=0.1, rtol=0)
        torch.testing.assert_close(drawn.std(), real.std(), atol=0.1, rtol=0)
        assert float(drawn.mean(0).std()) < 0.2  # nothing of any single pixel


def test_noise_does_not_depend_on_the_images():
    one, _ = start("noise", IMAGES, LABELS, 3, seeded(1))
    other, _ = start("noise", IMAGES * 7, LABELS, 3, seeded(1))
    assert torch.equal(one, other)


def test_unknown_start_is_refused_with_the_choices():
    with pytest.raises(DistillError, check=at("init", value="raw")) as refusal:
        start("raw", IMAGES, LABELS, 1, torch.Generator())
    assert refusal.value.remedy == "choose one of class-stats, pixel-stats, noise, real"


def copies(images, of):
    """How often each image of `of` is among `images`."""
    return [int((images == one).flatten(1).all(1).sum()) for one in of]


@given(held=st.integers(1, 9), per_class=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_real_start_repeats_an_image_only_after_all_others(held, per_class, seed):
    of_class = IMAGES[LABELS == 1][:held]
    drawn, labels = start(
        "real",
        torch.cat([of_class, IMAGES[LABELS == 4]]),
        torch.cat([torch.ones(held).long(), LABELS[LABELS == 4]]),
        per_class,
        seeded(seed),
    )
    times = copies(drawn[labels == 1], of_class)
    assert sum(times) == per_class
    assert max(times) - min(times) <= 1


def test_real_start_takes_other_images_for_other_seeds_and_changes_none():
    before = IMAGES.clone()
    draws = [start("real", IMAGES, LABELS, 5, seeded(s))[0] for s in (0, 1)]
    assert not torch.equal(*draws)
    draws[0].zero_()
    assert torch.equal(IMAGES, before)


def test_real_start_warns_in_the_log(caplog):
    caplog.set_level(logging.WARNING, logger="distill")  # which `flwr-distill audit` silences
    start("class-stats", IMAGES, LABELS, 1, torch.Generator())
    assert not caplog.records
    start("real", IMAGES, LABELS, 1, torch.Generator())
    assert "REAL IMAGES" in caplog.text


def test_node_and_run_need_permission_for_a_real_start():
    with pytest.raises(SettingsError, match=r"allow-real-start = False.* nearly unchanged"):
        Distillation.checked({"start": "real"}, "message")
    assert Distillation.checked({"start": "real", "allow-real-start": True}, "message")
    with pytest.raises(SettingsError, match=r"hfldd\.allow-real-start = False: must be true"):
        RunSettings.from_run_config({"hfldd.start": "real"})
    permitted = {"hfldd.start": "real", "hfldd.allow-real-start": True}
    request = RunSettings.from_run_config(permitted).hfldd.distillation
    assert (request.start, request.allow_real_start) == ("real", True)
