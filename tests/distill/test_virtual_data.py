"""What virtual data promises: it survives the wire, and nothing malformed gets in."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from distill import VirtualData, VirtualDataError
from distill.privacy import privacy_card
from distill.virtual_data import FORMAT


def virtual(images: Tensor, labels: Tensor, soft_labels: Tensor | None = None) -> VirtualData:
    return VirtualData(images, labels, "dm", 7, 2**40, "noise", soft_labels)


def example(n: int = 4, soft: bool = False) -> VirtualData:
    generator = torch.Generator().manual_seed(n)
    images = torch.randn(n, 3, 5, 4, generator=generator)
    soft_labels = torch.rand(n, 6, generator=generator).softmax(dim=1) if soft else None
    return virtual(images, torch.arange(n) % 6, soft_labels)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 4),
    scale=st.floats(1e-6, 1e6),
    offset=st.floats(-1e3, 1e3),
    seed=st.integers(0, 2**32 - 1),
    soft=st.booleans(),
)
def test_wire_keeps_everything_but_pixels_below_half_a_level(
    shape: tuple[int, int, int, int], scale: float, offset: float, seed: int, soft: bool
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy((scale * rng.standard_normal(shape) + offset).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 32768, shape[0]))
    soft_labels = torch.from_numpy(rng.random((shape[0], 3), dtype=np.float32)) if soft else None
    sent = virtual(images, labels, soft_labels)
    received = VirtualData.from_bytes(sent.to_bytes())

    half_level = float(images.max() - images.min()) / 510
    rounding = 1e-6 * float(images.abs().max())
    assert float((received.images - images).abs().max()) <= half_level + rounding
    assert torch.equal(received.labels, labels)
    assert (received.method, received.steps, received.seed, received.init) == (
        "dm",
        7,
        2**40,
        "noise",
    )
    if soft_labels is None:
        assert received.soft_labels is None
    else:
        assert received.soft_labels is not None
        assert torch.equal(received.soft_labels, soft_labels)


def test_equal_data_has_equal_bytes() -> None:
    assert len({example(soft=True).to_bytes() for _ in range(10)}) == 1


def test_wire_keeps_the_privacy_card() -> None:
    sent = example().with_card(torch.ones(3, 3, 5, 4), torch.zeros(2, 3, 5, 4))
    assert sent.card is not None
    assert sent.card.yardstick is not None
    assert VirtualData.from_bytes(sent.to_bytes()).card == sent.card
    assert VirtualData.from_bytes(example().to_bytes()).card is None


def test_the_card_tells_how_far_the_images_moved_and_where_they_began_stays_here() -> None:
    data, real = example(), torch.ones(3, 3, 5, 4)
    moved = replace(data, initial_images=data.images).with_card(real, torch.zeros(2, 3, 5, 4))
    assert moved.card == privacy_card(
        data.images, real, start=data.images, held_back=torch.zeros(2, 3, 5, 4)
    )
    assert moved.to_bytes() == replace(moved, initial_images=None).to_bytes()


def test_constant_images_come_back_exactly() -> None:
    images = torch.full((2, 1, 3, 3), -0.4242)
    received = VirtualData.from_bytes(virtual(images, torch.tensor([0, 1])).to_bytes())
    assert torch.equal(received.images, images)


def test_wire_takes_a_byte_a_pixel() -> None:
    small, large = example(10), example(1010)
    per_image = (len(large.to_bytes()) - len(small.to_bytes())) / 1000
    assert per_image == pytest.approx(3 * 5 * 4 + 2, abs=0.1)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_valid_data(data: st.DataObject) -> None:
    original = example(soft=True).to_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        received = VirtualData.from_bytes(bytes(damaged))
    except VirtualDataError:
        return
    assert received.images.isfinite().all()
    assert 0 <= int(received.labels.min()) <= int(received.labels.max()) <= 32767


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(VirtualDataError, match="not virtual data"):
        VirtualData.from_bytes(example().to_bytes()[:length])


def tampered(
    tensors: dict[str, Tensor] | None = None, about: dict[str, object] | None = None
) -> bytes:
    """Pack a valid example with some tensors or fields replaced."""
    fields = {"scale": 0.1, "offset": 0.0, "method": "dm", "steps": 1, "seed": 0, "init": "noise"}
    return save(
        load(example().to_bytes()) | (tensors or {}),
        metadata={"about": json.dumps({"format": FORMAT} | fields | (about or {}))},
    )


@pytest.mark.parametrize(
    ("tensors", "about", "complaint"),
    [
        ({}, {"scale": float("nan")}, "scale must be finite"),
        ({}, {"scale": -1.0}, "scale must be finite"),
        ({}, {"scale": 1e308}, "images must be finite"),
        ({}, {"offset": float("inf")}, "offset finite"),
        ({}, {"offset": "0"}, "offset must be of type float"),
        ({}, {"steps": True}, "steps must be of type int"),
        ({}, {"method": None}, "method must be of type str"),
        ({"labels": torch.tensor([0, 1, 2, -1], dtype=torch.int16)}, {}, "labels must lie in"),
        ({"labels": torch.zeros(4)}, {}, "labels must be int16"),
        ({"labels": torch.zeros(3, dtype=torch.int16)}, {}, r"labels must be int64 of shape \(4,"),
        ({"pixels": torch.zeros(4, 3, 5, 4)}, {}, "pixels must be uint8"),
        ({"pixels": torch.zeros(4, 60, dtype=torch.uint8)}, {}, "images must have a shape"),
        ({"pixels": torch.zeros(4, 0, 5, 4, dtype=torch.uint8)}, {}, "images must have a shape"),
        ({}, {"card": 1}, "a PrivacyCard has own, start, yardstick"),
        (
            {},
            {"card": {"own": {}, "start": None, "yardstick": None, "guarantee": None}},
            "a Closeness has",
        ),
        ({"soft_labels": torch.full((4, 2), torch.nan)}, {}, "soft_labels must be finite"),
        ({"soft_labels": torch.zeros(3, 2)}, {}, "soft_labels must have a shape"),
    ],
)
def test_tampered_content_is_refused_by_name(
    tensors: dict[str, Tensor], about: dict[str, object], complaint: str
) -> None:
    with pytest.raises(VirtualDataError, match=complaint):
        VirtualData.from_bytes(tampered(tensors, about))


def test_other_safetensors_are_refused() -> None:
    with pytest.raises(VirtualDataError, match="not virtual data"):
        VirtualData.from_bytes(save({"w": torch.zeros(2)}))
    with pytest.raises(VirtualDataError, match="format must be"):
        VirtualData.from_bytes(
            save(load(example().to_bytes()), metadata={"about": '{"format": "else"}'})
        )
    with pytest.raises(VirtualDataError, match="must be an object"):
        VirtualData.from_bytes(save(load(example().to_bytes()), metadata={"about": "[]"}))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: virtual(torch.zeros(2, 3, 4), torch.zeros(2).long()), "images must have a shape"),
        (lambda: virtual(torch.zeros(2, 1, 2, 2).double(), torch.zeros(2).long()), "float32"),
        (lambda: virtual(torch.full((1, 1, 2, 2), torch.nan), torch.zeros(1).long()), "finite"),
        (lambda: virtual(torch.zeros(2, 1, 2, 2), torch.zeros(2)), "labels must be int64"),
        (lambda: virtual(torch.zeros(1, 1, 2, 2), torch.tensor([40_000])), "must lie in"),
    ],
)
def test_inconsistent_data_cannot_be_made(make: Callable[[], VirtualData], complaint: str) -> None:
    with pytest.raises(VirtualDataError, match=complaint):
        make()


def test_validate_accepts_what_fits_and_names_what_does_not() -> None:
    data = example(soft=True)
    data.validate((3, 5, 4), 6)
    with pytest.raises(VirtualDataError, match=r"shape \(3, 5, 4\), the task has \(1, 28, 28\)"):
        data.validate((1, 28, 28), 6)
    with pytest.raises(VirtualDataError, match=r"label 3 is outside the task's classes 0\.\.2"):
        data.validate((3, 5, 4), 3)
    with pytest.raises(VirtualDataError, match="soft_labels must have 10 columns"):
        data.validate((3, 5, 4), 10)
    with pytest.raises(VirtualDataError, match="above 20"):
        replace(data, images=torch.full((4, 3, 5, 4), -20.1)).validate((3, 5, 4), 6)
    for off in (torch.full((4, 6), 0.3), torch.tensor([[1.5, -0.5, 0, 0, 0, 0]] * 4)):
        with pytest.raises(VirtualDataError, match="soft_labels must be distributions"):
            replace(data, soft_labels=off).validate((3, 5, 4), 6)
