"""An image of several small ones: what it is decoded to, and what it costs and tells."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from flwr_distill.distill import DistillError, VirtualData
from flwr_distill.distill.contact_sheet import contact_sheet
from flwr_distill.distill.formation import MAX_FORMATION, Formation, best_formation
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import VARIANTS
from flwr_distill.distill.ntk import ntk
from flwr_distill.distill.registry import formation_arguments
from flwr_distill.distill.starts import start
from flwr_distill.strategies.hfldd.requests import Distillation, ParcelBounds
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from tests.distill.builders import distilled, labelled, normal, seeded
from tests.errors import at

SIDES = st.integers(4, 13)
FACTORS = st.integers(2, MAX_FORMATION)


def tile(image, factor, row, column):
    """Cut a tile out of an image (C, H, W)."""
    (top, bottom), (left, right) = (
        (size * place // factor, size * (place + 1) // factor)
        for size, place in zip(image.shape[1:], (row, column), strict=True)
    )
    return image[:, top:bottom, left:right]


@settings(deadline=None, max_examples=30)
@given(height=SIDES, width=SIDES, factor=FACTORS)
def test_decoded_images_are_the_tiles_enlarged_one_by_one(height, width, factor):
    images = normal(3, 2, height, width)
    expected = [
        functional.interpolate(
            tile(image, factor, row, column)[None], (height, width), mode="bilinear"
        )
        for image in images
        for row in range(factor)
        for column in range(factor)
    ]
    formation = Formation.of(factor, images.shape)
    torch.testing.assert_close(formation.decode(images), torch.cat(expected))
    by_class = images.reshape(3, 1, 2, height, width).expand(3, 2, -1, -1, -1)
    torch.testing.assert_close(
        formation.decode(by_class)[1, : factor**2], torch.cat(expected)[factor**2 : 2 * factor**2]
    )


@settings(deadline=None, max_examples=30)
@given(height=SIDES, width=SIDES, factor=FACTORS)
def test_packed_images_are_shrunk_into_tiles_one_by_one(height, width, factor):
    images = normal(2 * factor**2, 2, height, width)
    formation = Formation.of(factor, images.shape)
    packed = formation.pack(images)
    for index, image in enumerate(images):
        which, place = divmod(index, factor**2)
        found = tile(packed[which], factor, *divmod(place, factor))
        expected = functional.adaptive_avg_pool2d(image[None], found.shape[1:])[0]
        torch.testing.assert_close(found, expected)
    repeated = formation.pack(images.repeat_interleave(factor**2, 0))
    torch.testing.assert_close(formation.tiled(images), repeated)
    first_tiles = formation.decode(repeated)[:: factor**2]
    torch.testing.assert_close(formation.coarse(images), first_tiles)


@settings(deadline=None, max_examples=30)
@given(height=SIDES, width=SIDES, factor=FACTORS)
def test_gradients_pass_back_by_the_adjoint(height, width, factor):
    images = torch.randn(2, 3, 1, height, width, generator=seeded(1), requires_grad=True)
    formation = Formation.of(factor, images.shape)
    decoded = formation.decode(images)
    upstream = normal(decoded.shape, seed=2)
    (expected,) = torch.autograd.grad(decoded, images, upstream)
    torch.testing.assert_close(formation.pullback(upstream), expected)


@settings(deadline=None, max_examples=30)
@given(height=SIDES, width=SIDES, factor=FACTORS)
def test_small_ones_are_the_enlarged_ones_shrunk(height, width, factor):
    images = torch.randn(2, 3, height, width, generator=seeded(1), requires_grad=True)
    formation = Formation.of(factor, images.shape)
    small = formation.in_small()
    expected = formation.shrunk(formation.decode(images))
    assert expected.shape == (2 * factor**2, 3, height // factor, width // factor)
    torch.testing.assert_close(small.decode(images), expected)
    upstream = normal(expected.shape, seed=2)
    (gradient,) = torch.autograd.grad(expected, images, upstream)
    torch.testing.assert_close(small.pullback(upstream), gradient)


def test_one_image_an_image_is_left_untouched():
    images = torch.randn(2, 1, 5, 4)
    formation = Formation.of(1, images.shape)
    assert formation.in_small() is formation
    for unchanged in ("decode", "pullback", "pack", "tiled", "coarse"):
        assert getattr(formation, unchanged)(images) is images


def test_settings_have_the_bound_of_the_format():
    for block, others in (
        (Distillation, {}),
        (ParcelBounds, {"images": 1, "of-a-class": 1, "server-round": 1}),
    ):
        assert block.checked({"formation": MAX_FORMATION, **others}, "message")
        with pytest.raises(SettingsError, match="formation"):
            block.checked({"formation": MAX_FORMATION + 1, **others}, "message")


def example(formation=2):
    images = normal(3, 1, 8, 6)
    soft = torch.rand(3, 5, generator=seeded()).softmax(1)
    return VirtualData(
        images,
        torch.tensor([0, 1, 4]),
        "dm",
        1,
        0,
        "noise",
        soft_labels=soft,
        initial_images=images + 1,
        formation=formation,
    )


def test_all_that_belongs_to_an_image_is_repeated_for_its_tiles():
    packed = example()
    decoded = packed.decoded()
    formation = Formation.of(2, packed.images.shape)
    assert torch.equal(decoded.images, formation.decode(packed.images))
    assert torch.equal(decoded.initial_images, formation.decode(packed.images + 1))
    assert decoded.labels.tolist() == [0] * 4 + [1] * 4 + [4] * 4
    assert torch.equal(decoded.soft_labels[::4], packed.soft_labels)
    assert torch.equal(decoded.soft_labels[3::4], packed.soft_labels)
    assert decoded.formation == 1
    assert decoded.decoded() is decoded


def test_a_real_image_shrunk_into_a_tile_counts_as_a_copy():
    real, others = normal(2, 9, 1, 8, 8, seed=3)
    images = Formation.of(2, real.shape).pack(torch.cat([others[:7], real[:1]]))
    made = VirtualData(images, torch.tensor([0, 1]), "dm", 1, 0, "noise", formation=2)
    card = made.with_card(real, others[7:]).card
    assert card.own.least_distance < 1e-6
    assert card.own.highest_cosine > 1 - 1e-6
    assert card.own.median_distance > 0.1


def test_a_picture_shows_tiles_as_large_as_images():
    images, labels = torch.randn(1, 1, 28, 28), torch.tensor([0])
    plain = contact_sheet(images, labels, ["a"])
    assert contact_sheet(images, labels, ["a"], 2).height > 2 * plain.height


def test_a_real_start_packs_as_many_others_into_an_image():
    real = torch.arange(8.0)[:, None, None, None].expand(8, 1, 4, 4)
    images, labels = start("real", real.clone(), torch.zeros(8).long(), 2, seeded(), 2)
    assert labels.tolist() == [0, 0]
    assert images[:, 0, ::2, ::2].flatten().sort().values.tolist() == list(range(8))


def run(name, formation=2):
    return distilled(name, *labelled(), formation=formation)


@pytest.mark.parametrize("name", [*VARIANTS, "dm", "auto"])
def test_every_distiller_packs_images_with_no_more_pixels(name):
    one, two = run(name), run(name)
    assert torch.equal(one.images, two.images)
    assert one.formation == 2
    assert one.images.shape == (6, 1, 8, 8)
    assert one.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert one.initial_images is not None
    assert not torch.equal(one.images, one.initial_images)


def test_small_images_teach_more_in_the_same_bytes():
    """Digits of 16 x 16, an image of each; kernel regression from what was made of them."""
    dataset = load_dataset("digits")
    train, test = (
        functional.interpolate(part.to_samples(dataset.spec).inputs[:600], scale_factor=2.0)
        for part in (dataset.train, dataset.test)
    )
    labels = torch.as_tensor(dataset.train.labels[:600])

    def accuracy(formation):
        asked = {"num_classes": 10, "per_class": 1, "steps": 60, "width": 16, "bank": 10}
        made = distilled("dm", train, labels, seed=0, formation=formation, **asked).decoded()
        points = made.images.flatten(1).double()
        kernel, _ = ntk(points)
        weights = torch.linalg.solve(
            kernel + 1e-6 * kernel.diagonal().mean() * torch.eye(len(kernel)),
            functional.one_hot(made.labels, 10).double() - 0.1,
        )
        predicted = ntk(points, test.flatten(1).double())[0] @ weights
        return float((predicted.argmax(1).numpy() == dataset.test.labels[:600]).mean())

    assert accuracy(2) > accuracy(1) + 0.1


def test_gradients_are_matched_on_decoded_images():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    images, labels = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    target = {"1.weight": torch.randn(3, 64)}
    losses = []
    asked = {"formation": 2, "progress": lambda step, steps, loss: losses.append(loss)}
    refined = match_gradient(images, labels, target, model, steps=30, **asked)
    assert refined.shape == images.shape
    assert losses[-1] < losses[0]


def no_formation(images, labels, *, num_classes):
    return VirtualData(images[:1], labels[:1], "mine", 0, 0, "real")


def test_a_formation_costs_its_name_on_the_wire_and_one_image_nothing():
    packed, plain = example().to_safetensors(), example(formation=1).to_safetensors()
    assert b"formation" not in plain
    assert 0 < len(packed) - len(plain) <= 24
    assert VirtualData.from_safetensors(plain).formation == 1
    received = VirtualData.from_safetensors(packed)
    assert (received.formation, len(received), len(received.decoded())) == (2, 3, 12)


@pytest.mark.parametrize(
    ("factor", "shape"), [(0, (8, 8)), (-1, (8, 8)), (5, (8, 8)), (3, (8, 2)), (2, (1, 12))]
)
def test_a_formation_that_images_have_no_room_for_is_refused(factor, shape):
    with pytest.raises(DistillError, check=at("formation", value=factor)):
        Formation.of(factor, shape)


def test_a_distiller_without_formations_makes_one_image_of_each():
    name = f"{__name__}:no_formation"
    assert formation_arguments("auto", 3) == formation_arguments("kip", 3) == {"formation": 3}
    assert formation_arguments(name, 0) == formation_arguments(name, 1) == {}
    with pytest.raises(DistillError, check=at("formation", value=2, remedy="set it to 1")):
        formation_arguments(name, 2)


@pytest.mark.parametrize("name", ["dm", "kip", "auto"])
def test_a_method_chooses_its_formation_and_never_more_than_a_head_takes(name):
    assert run(name, formation=0).formation == 1  # 8 x 8
    images, labels = torch.randn(4, 1, 16, 16), torch.arange(4) % 2
    made = distilled(name, images, labels, per_class=1, steps=1, formation=0)
    assert made.formation <= best_formation(images.shape) == 2
