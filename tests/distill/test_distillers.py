"""What every distiller promises: determinism, the stated fallbacks, clear refusals."""

import logging
import sys
import types

import pytest
import torch

import flwr_distill.distill
from flwr_distill.distill import DistillError, distiller
from flwr_distill.distill.auto import choose
from flwr_distill.distill.kip import VARIANTS
from tests.distill.builders import distilled, normal, seeded
from tests.errors import at

NAMES = [*VARIANTS, "dm", "auto"]


def data(n=24, classes=3):
    return normal(n, 1, 8, 8, seed=n), torch.arange(n) % classes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("init", ["class-stats", "pixel-stats", "noise"])
def test_same_generator_same_result_and_global_state_untouched(name, init):
    images, labels = data()
    before = torch.get_rng_state()
    one = distilled(name, images, labels, init=init)
    torch.manual_seed(99)
    two = distilled(name, images, labels, init=init)
    other = distilled(name, images, labels, init=init, seed=6)
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    torch.set_rng_state(before)
    distilled(name, images, labels, init=init)
    assert torch.equal(before, torch.get_rng_state())
    assert (one.seed, one.init, one.steps) == (5, init, 3)


@pytest.mark.parametrize("name", NAMES)
def test_progress_is_reported_after_each_step_and_inputs_stay_unchanged(name):
    (images, labels), seen = data(), []
    copies = images.clone(), labels.clone()
    distilled(name, images, labels, progress=lambda step, steps, loss: seen.append((step, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(images, copies[0])
    assert torch.equal(labels, copies[1])


@pytest.mark.parametrize("name", ["kip", "dm"])
def test_every_image_of_a_large_node_can_be_drawn_not_only_the_first_256(name):
    """600 images a class, of which those from the 257th on are then others of the same range."""
    images = torch.rand(1200, 1, 8, 8, generator=seeded())
    images[:2, 0, 0, 0] = torch.tensor([0.0, 1.0])
    labels = torch.arange(1200) % 2
    others = images.clone()
    others[512:] = 1 - images[512:]
    one, same, other = (
        distilled(name, x, labels, init="noise") for x in (images, images.clone(), others)
    )
    assert torch.equal(one.initial_images, other.initial_images)
    assert torch.equal(one.images, same.images)
    assert not torch.equal(one.images, other.images)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "images",
    [torch.randn(1, 1, 8, 8), torch.zeros(6, 1, 8, 8), torch.full((6, 3, 8, 8), -2.5)],
    ids=["one image", "all zero", "constant"],
)
def test_degenerate_nodes_still_give_the_number_asked_for(name, images):
    labels = torch.arange(len(images)) % 2
    made = distilled(name, images, labels, per_class=5)
    assert len(made) == 5 * len(torch.unique(labels))
    assert made.images.shape[1:] == images.shape[1:]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "where", "value"),
    [
        (
            {"images": torch.zeros(0, 1, 8, 8), "labels": torch.zeros(0).long()},
            "images",
            (0, 1, 8, 8),
        ),
        ({"images": torch.full((24, 1, 8, 8), torch.nan)}, "images", None),
        ({"images": torch.zeros(24, 64)}, "images", (torch.float32, (24, 64))),
        ({"images": torch.zeros(24, 1, 8, 8).double()}, "images", (torch.float64, (24, 1, 8, 8))),
        ({"labels": torch.zeros(23).long()}, "labels", (torch.int64, (23,))),
        ({"labels": torch.zeros(24)}, "labels", (torch.float32, (24,))),
        ({"labels": torch.full((24,), 4)}, "labels", (4, 4)),
        ({"labels": torch.full((24,), -1)}, "labels", (-1, -1)),
        ({"per_class": 0}, "per_class", 0),
        ({"steps": 0}, "steps", 0),
        ({"num_classes": 0}, "num_classes", 0),
        ({"init": "raw"}, "init", "raw"),
    ],
)
def test_unusable_input_is_refused(name, changes, where, value):
    images, labels = data()
    with pytest.raises(DistillError, check=at(where, value=value)):
        distilled(name, **{"images": images, "labels": labels} | changes)


@pytest.mark.parametrize(
    ("held", "num_classes", "side", "expected"),
    [
        (1, 10, 8, "kip-negatives"),
        (2, 10, 8, "dm"),
        (5, 10, 8, "dm"),
        (6, 10, 15, "kip"),
        (10, 10, 8, "kip"),
        (1, 1, 8, "kip-negatives"),
        (1, 10, 16, "dm"),
        (10, 10, 28, "dm"),
    ],
)
def test_auto_takes_what_suits_the_images_and_the_number_of_classes_held(
    held, num_classes, side, expected
):
    assert choose(held, num_classes, (1, side, side))[0] == expected


@pytest.mark.parametrize(("classes", "expected"), [(2, "dm"), (3, "kip")])
def test_auto_is_the_method_it_names_and_logs_why(classes, expected, caplog):
    images, labels = data(classes=classes)
    with caplog.at_level(logging.INFO, logger="distill"):
        made = distilled("auto", images, labels)
    assert made.method == expected
    assert torch.equal(made.images, distilled(expected, images, labels).images)
    assert f"auto takes {expected}: the node has {classes} of 4 classes" in caplog.text


def test_unknown_distiller_is_refused_with_the_choices():
    with pytest.raises(DistillError, check=at("distiller", value="kpi")) as refusal:
        distiller("kpi")
    assert "choose one of auto, dm, kip" in refusal.value.remedy


def test_outside_distiller_is_found_by_module_and_name(monkeypatch):
    module = types.ModuleType("someones_distiller")
    module.mine = flwr_distill.distill.distill_dm
    module.number = 3
    monkeypatch.setitem(sys.modules, "someones_distiller", module)
    assert distiller("someones_distiller:mine") is flwr_distill.distill.distill_dm
    absent = ("someones_distiller:absent", "no_such_module:fn", ":fn", "someones_distiller:number")
    for name in absent:
        with pytest.raises(DistillError, check=at("distiller", value=name)):
            distiller(name)


def test_exports_are_exactly_what_all_says():
    public = {
        name
        for name, value in vars(flwr_distill.distill).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(flwr_distill.distill.__all__) == public
    assert flwr_distill.distill.__all__ == sorted(
        flwr_distill.distill.__all__, key=lambda s: (s.islower(), s)
    )
