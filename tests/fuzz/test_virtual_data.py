"""Whatever bytes come as virtual data, they are virtual data or refused."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from flwr_distill.distill import VirtualData, VirtualDataError
from flwr_distill.distill.formation import MAX_FORMATION
from flwr_distill.distill.packing import packed
from flwr_distill.distill.privacy import privacy_card
from flwr_distill.distill.virtual_data import MAX_VALUE
from flwr_distill.distill.virtual_header import FORMAT, Bounds
from flwr_distill.distill.virtual_overview import Overview

from .conftest import FUZZ, JSON, damaged

SHAPE, CLASSES = (1, 4, 4), 3
IMAGES = torch.linspace(-1, 2, 5 * 16).reshape(5, *SHAPE)
VALID = VirtualData(
    IMAGES,
    torch.tensor([0, 1, 2, 0, 1]),
    "dm",
    7,
    1,
    "noise",
    soft_labels=torch.full((5, CLASSES), 1 / 3),
    card=privacy_card(IMAGES, IMAGES + 1, start=None, held_back=IMAGES[:0]),
)
ABOUT = {"format": FORMAT, "scale": 0.1, "offset": 0.0, "method": "dm", "steps": 1, "seed": 0}
ABOUT |= {"init": "noise", "card": None, "formation": 2}
TYPES = [torch.uint8, torch.int16, torch.int64, torch.float32, torch.float64, torch.bool]


BOUNDS = Bounds(SHAPE, CLASSES, images=5, of_a_class=5, formation=MAX_FORMATION)


def check(data):
    """Whether these are virtual data that fit."""
    try:
        found = Overview.of(data)
    except VirtualDataError:
        found = None
    try:
        virtual = VirtualData.received(data, BOUNDS)
    except VirtualDataError:
        return False
    if found is not None:  # it refuses some ways to write a header, which nodes do not write
        assert found.labels == tuple(virtual.labels.unique().tolist())
        assert (found.method, found.init) == (virtual.method, virtual.init)
    assert virtual.images.shape == (len(virtual), *SHAPE)
    assert float(virtual.images.abs().max()) <= MAX_VALUE
    assert 0 <= int(virtual.labels.min()) <= int(virtual.labels.max()) < CLASSES
    decoded = virtual.decoded()
    assert len(decoded) == len(virtual) * virtual.formation**2 <= len(virtual) * MAX_FORMATION**2
    assert float(decoded.images.abs().max()) <= 1.001 * MAX_VALUE
    return True


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes(data):
    assert not check(data)
    assert not check(packed(data))


@FUZZ
@given(damaged(VALID.to_bytes(bits=4)))
def test_damaged_virtual_data(data):
    check(data)


@FUZZ
@given(damaged(VALID.to_safetensors()))
def test_virtual_data_damaged_before_they_were_packed(data):
    check(packed(data))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    values = torch.full(shape, draw(st.integers(-3, 300)))
    return values.to(draw(st.sampled_from(TYPES)))


@FUZZ
@given(
    st.fixed_dictionaries({}, optional={n: tensors() for n in ("pixels", "labels", "soft_labels")}),
    st.dictionaries(st.sampled_from(sorted(ABOUT)), JSON | st.floats() | st.integers(0, 9)),
    JSON,
)
def test_other_tensors_and_another_account_of_them(others, changed, other_about):
    for about in ({**ABOUT, **changed}, other_about):
        check(with_tensors(about, **others))


def with_tensors(about, **others):
    own = {"pixels": torch.zeros(5, *SHAPE, dtype=torch.uint8)}
    own["labels"] = torch.zeros(5, dtype=torch.int16)
    return packed(save({**own, **others}, metadata={"about": json.dumps(about)}))


def test_whole_ones_are_taken_and_those_of_too_few_or_other_labels_are_not():
    assert check(VALID.to_bytes())
    assert sum(Overview.of(VALID.to_bytes()).images_of_class) == len(VALID)
    assert check(with_tensors(ABOUT))
    assert check(with_tensors(ABOUT, labels=torch.full((5,), CLASSES - 1, dtype=torch.int16)))
    assert not check(with_tensors(ABOUT, labels=torch.full((5,), CLASSES, dtype=torch.int16)))
    assert not check(with_tensors(ABOUT, labels=torch.full((5,), -1, dtype=torch.int16)))
    assert not check(with_tensors(ABOUT, labels=torch.zeros(4, dtype=torch.int16)))
    assert not check(with_tensors(ABOUT | {"format": "other"}))
