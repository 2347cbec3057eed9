"""What virtual data promises: it survives the wire, and nothing malformed gets in."""

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from flwr_distill.distill import VirtualData, VirtualDataError, virtual_data
from flwr_distill.distill.packing import max_packed_size, packed, unpacked
from flwr_distill.distill.privacy import privacy_card
from flwr_distill.distill.virtual_data import MAX_MEAN, MAX_VALUE
from flwr_distill.distill.virtual_header import FORMAT, Bounds, Header
from flwr_distill.distill.virtual_overview import Overview
from tests.distill.builders import seeded
from tests.errors import at


def virtual(images, labels, soft_labels=None):
    return VirtualData(images, labels, "dm", 7, 2**40, "noise", soft_labels)


def example(n=4, soft=False):
    generator = seeded(n)
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
    bits=st.integers(1, 8),
)
def test_wire_keeps_everything_but_pixels_below_half_a_level_and_far_ones(
    shape, scale, offset, seed, soft, bits
):
    rng = np.random.default_rng(seed)
    images = torch.from_numpy((scale * rng.standard_normal(shape) + offset).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 32768, shape[0]))
    soft_labels = torch.from_numpy(rng.random((shape[0], 3), dtype=np.float32)) if soft else None
    sent = virtual(images, labels, soft_labels)
    received = VirtualData.from_bytes(sent.to_bytes(bits))

    if images.abs().mean() <= MAX_MEAN:
        images = images.clamp(-MAX_VALUE, MAX_VALUE)
    half_level = float(images.max() - images.min()) / 2 / (2**bits - 1)
    rounding = 1e-6 * float(images.abs().max())
    assert float((received.images - images).abs().max()) <= half_level + rounding
    assert torch.equal(received.labels, labels)
    assert len(received.images.unique()) <= 2**bits
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


def test_equal_data_has_equal_bytes():
    assert len({example(soft=True).to_bytes() for _ in range(10)}) == 1


def test_wire_keeps_the_privacy_card():
    sent = example().with_card(torch.ones(3, 3, 5, 4), torch.zeros(2, 3, 5, 4))
    assert sent.card is not None
    assert sent.card.yardstick is not None
    assert VirtualData.from_bytes(sent.to_bytes()).card == sent.card
    assert VirtualData.from_bytes(example().to_bytes()).card is None


def test_the_card_tells_how_far_the_images_moved_and_where_they_began_stays_here():
    data, real = example(), torch.ones(3, 3, 5, 4)
    moved = replace(data, initial_images=data.images).with_card(real, torch.zeros(2, 3, 5, 4))
    assert moved.card == privacy_card(
        data.images, real, start=data.images, held_back=torch.zeros(2, 3, 5, 4)
    )
    assert moved.to_bytes() == replace(moved, initial_images=None).to_bytes()


def test_constant_images_come_back_exactly():
    images = torch.full((2, 1, 3, 3), -0.4242)
    received = VirtualData.from_bytes(virtual(images, torch.tensor([0, 1])).to_bytes())
    assert torch.equal(received.images, images)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_noise_takes_no_more_than_its_bits_and_less_where_levels_are_rare(bits):
    def per_pixel(images):
        data = virtual(images, torch.arange(400) % 10)
        return 8 * len(data.to_bytes(bits)) / images.numel()

    generator = seeded(bits)
    noise = torch.rand(400, 1, 16, 16, generator=generator)
    assert bits * 0.98 < per_pixel(noise) < bits * 1.15 + 0.05
    assert per_pixel(noise**8) < 0.8 * bits


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_beyond_a_byte_are_refused(bits):
    with pytest.raises(VirtualDataError, check=at("bits", value=bits)):
        example().to_bytes(bits)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_valid_data(data):
    wire = data.draw(st.booleans())
    original = example(soft=True).to_bytes() if wire else example(soft=True).to_safetensors()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        read = VirtualData.from_bytes if wire else VirtualData.from_safetensors
        received = read(bytes(damaged))
    except VirtualDataError:
        return
    assert received.images.isfinite().all()
    assert 0 <= int(received.labels.min()) <= int(received.labels.max()) <= 32767


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_truncated_bytes_are_refused(length):
    with pytest.raises(VirtualDataError, check=at("virtual data")):
        VirtualData.from_bytes(example().to_bytes()[:length])


def tampered(tensors=None, about=None):
    """A valid example with some tensors or fields replaced, not packed."""
    fields = {"scale": 0.1, "offset": 0.0, "method": "dm", "steps": 1, "seed": 0, "init": "noise"}
    return save(
        load(example().to_safetensors()) | (tensors or {}),
        metadata={"about": json.dumps({"format": FORMAT} | fields | (about or {}))},
    )


READERS = {
    "data": VirtualData.from_safetensors,
    "overview": lambda content: Overview.of(packed(content)),
}
both_readers = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
NO_CARD = {"own": {}, "start": None, "yardstick": None, "guarantee": None}


@both_readers
@pytest.mark.parametrize(
    ("tensors", "about", "where"),
    [
        ({}, {"scale": float("nan")}, "scale"),
        ({}, {"scale": -1.0}, "scale"),
        ({}, {"offset": float("inf")}, "offset"),
        ({}, {"offset": "0"}, "offset"),
        ({}, {"steps": True}, "steps"),
        ({}, {"method": None}, "method"),
        ({}, {"method": "x" * 300}, "method"),
        ({}, {"seed": 10**30}, "seed"),
        ({}, {"format": "else"}, "format"),
        ({}, {"formation": "2"}, "formation"),
        ({}, {"formation": True}, "formation"),
        ({}, {"formation": None}, "formation"),
        ({}, {"formation": 10**6}, "formation"),
        ({}, {"card": 1}, "privacy card"),
        ({}, {"card": NO_CARD}, "privacy card"),
        ({}, {"note": "a record"}, "header"),
        ({"labels": torch.tensor([0, 1, 2, -1], dtype=torch.int16)}, {}, "labels"),
        ({"labels": torch.zeros(4)}, {}, "virtual data"),
        ({"labels": torch.zeros(3, dtype=torch.int16)}, {}, "virtual data"),
        ({"pixels": torch.zeros(4, 3, 5, 4)}, {}, "virtual data"),
        ({"pixels": torch.zeros(4, 60, dtype=torch.uint8)}, {}, "virtual data"),
        ({"pixels": torch.zeros(4, 0, 5, 4, dtype=torch.uint8)}, {}, "virtual data"),
        ({"soft_labels": torch.zeros(3, 2)}, {}, "virtual data"),
        ({"samples": torch.zeros(9)}, {}, "virtual data"),
    ],
)
def test_tampered_content_is_refused_by_name(read, tensors, about, where):
    read(tampered())
    with pytest.raises(VirtualDataError, check=at(where)):
        read(tampered(tensors, about))


@pytest.mark.parametrize(
    ("tensors", "about", "where"),
    [
        ({}, {"scale": 1e308}, "images"),
        ({"soft_labels": torch.full((4, 2), torch.nan)}, {}, "soft_labels"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tensors, about, where):
    with pytest.raises(VirtualDataError, check=at(where)):
        VirtualData.from_safetensors(tampered(tensors, about))


def headers():
    """Headers of another kind, or in which something hides."""
    content = tampered()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = header["__metadata__"]["about"]
    yield from (b"[]", b"{}", b'{"pixels": 1}', b'{"pixels": {"shape": [[]]}}', b"[" * 10_000)
    for other in ('"formation"', "[]", "2", "null", about.replace(" ", "  ")):
        yield {**header, "__metadata__": {"about": other}}
    yield {**header, "__metadata__": {"about": about, "more": "a record"}}
    yield {**header, "more": {}}
    yield json.dumps(header).encode()  # with spaces
    yield b"{" + b" " * 500 + b"}"


@both_readers
@pytest.mark.parametrize("header", list(headers()))
def test_nothing_but_the_header_that_we_write_is_read(read, header):
    """Nobody reads more, so it would be a way out of a node that lets virtual data leave."""
    content = tampered()
    end = 8 + int.from_bytes(content[:8], "little")
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":"))
    text = text.encode() if isinstance(text, str) else text
    text = text.ljust(-(-len(text) // 8) * 8)
    with pytest.raises(VirtualDataError):
        read(len(text).to_bytes(8, "little") + text + content[end:])


@both_readers
def test_other_safetensors_are_refused(read):
    with pytest.raises(VirtualDataError, check=at("virtual data")):
        read(save({"w": torch.zeros(2)}))


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: virtual(torch.zeros(2, 3, 4), torch.zeros(2).long()), "images"),
        (lambda: virtual(torch.zeros(2, 1, 2, 2).double(), torch.zeros(2).long()), "images"),
        (lambda: virtual(torch.full((1, 1, 2, 2), torch.nan), torch.zeros(1).long()), "images"),
        (lambda: virtual(torch.zeros(2, 1, 2, 2), torch.zeros(2)), "labels"),
        (lambda: virtual(torch.zeros(1, 1, 2, 2), torch.tensor([40_000])), "labels"),
        (lambda: replace(example(), formation=0), "formation"),
        (lambda: replace(example(), formation=5), "formation"),
    ],
)
def test_inconsistent_data_cannot_be_made(make, where):
    with pytest.raises(VirtualDataError, check=at(where)):
        make()


def test_validate_accepts_what_fits_and_names_what_does_not():
    data = example(soft=True)
    data.validate((3, 5, 4), 6)
    for shape, classes, where in (
        ((1, 28, 28), 6, "shape of virtual images"),
        ((3, 5, 4), 3, "virtual label"),
        ((3, 5, 4), 10, "columns of soft_labels"),
    ):
        with pytest.raises(VirtualDataError, check=at(where)):
            data.validate(shape, classes)
    with pytest.raises(VirtualDataError, check=at("largest value of virtual images")):
        replace(data, images=torch.full((4, 3, 5, 4), -20.1)).validate((3, 5, 4), 6)
    for off in (torch.full((4, 6), 0.3), torch.tensor([[1.5, -0.5, 0, 0, 0, 0]] * 4)):
        with pytest.raises(VirtualDataError, check=at("soft_labels")):
            replace(data, soft_labels=off).validate((3, 5, 4), 6)


SHAPE, CLASSES = (3, 5, 4), 6
BOUNDS = Bounds(SHAPE, CLASSES, images=4, of_a_class=1)


def test_what_fits_the_bounds_is_received_as_it_is_read():
    data = example(soft=True).to_bytes()
    received, read = VirtualData.received(data, BOUNDS), VirtualData.from_bytes(data)
    assert torch.equal(received.images, read.images)
    assert torch.equal(received.labels, read.labels)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_values_that_no_receiver_takes_are_cut_before_they_are_sent(bits):
    """A row of a table may lie 30 deviations from the mean: its class must not be lost with it."""
    images = example().images.clone()
    images[0, 0, 0, 0], images[1, 0, 0, 0] = 30.0, -30.0
    received = VirtualData.received(replace(example(), images=images).to_bytes(bits), BOUNDS)
    assert float(received.images.max()) == MAX_VALUE
    assert float(received.images.min()) == -MAX_VALUE


def test_what_is_not_normalised_is_refused_and_not_cut():
    sent = replace(example(), images=example().images.abs() * 100).to_bytes()
    with pytest.raises(VirtualDataError, check=at("largest value of virtual images")):
        VirtualData.received(sent, BOUNDS)


def test_the_bytes_that_are_allowed_suffice_for_the_largest_honest_data():
    images = torch.randn(400, *SHAPE)
    data = virtual(images, torch.arange(400) % CLASSES, torch.full((400, CLASSES), 1 / CLASSES))
    sent = data.with_card(images + 1, images[:5]).to_bytes()
    assert len(sent) <= Bounds(SHAPE, CLASSES, images=400, of_a_class=400).num_bytes


@pytest.mark.parametrize(
    ("data", "where", "value"),
    [
        (example(5), "virtual images", 5),
        (replace(example(), labels=torch.tensor([0, 1, 2, 2])), "virtual images of one class", 2),
        (
            replace(example(), images=torch.zeros(4, 60, 1, 1)),
            "shape of virtual images",
            (60, 1, 1),
        ),
        (
            replace(example(), soft_labels=torch.full((4, 1000), 1e-3)),
            "columns of soft_labels",
            1000,
        ),
    ],
)
def test_what_exceeds_the_bounds_is_refused_before_any_tensor_is_made(
    data, where, value, monkeypatch
):
    sent = data.to_bytes()
    if "of one class" not in where:  # which only the labels can tell
        monkeypatch.setattr(virtual_data, "load", None)
    with pytest.raises(VirtualDataError, check=at(where, value=value)):
        VirtualData.received(sent, BOUNDS)


def test_a_million_images_are_refused_where_forty_are_allowed(monkeypatch):
    n = 2**20
    pixels = torch.zeros(n, 1, 1, 1, dtype=torch.uint8)
    content = tampered({"pixels": pixels, "labels": torch.zeros(n, dtype=torch.int16)})
    bounds = Bounds((1, 1, 1), 10, images=40, of_a_class=40)
    with pytest.raises(VirtualDataError, check=at("virtual images", value=n)):
        Header.read(content).check(bounds)
    noise = torch.randint(256, (2**20,), dtype=torch.uint8)
    monkeypatch.setattr(virtual_data, "unpacked", None)
    with pytest.raises(VirtualDataError, check=at("bytes of virtual data")):
        VirtualData.received(packed(noise.numpy().tobytes()), bounds)


def test_a_bomb_is_not_unpacked_beyond_its_bounds():
    bomb = packed(bytes(2**26))
    assert len(bomb) < BOUNDS.num_bytes
    tracemalloc.start()
    with pytest.raises(VirtualDataError, match=r"exceeds .* bytes when unpacked"):
        VirtualData.received(bomb, BOUNDS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("soft", [False, True])
def test_an_overview_says_what_the_data_say(soft):
    sent = example(4, soft)
    assert Overview.of(sent.to_bytes()) == Overview("dm", "noise", (0, 1, 2, 3), (1, 1, 1, 1))
    tiles = Overview.of(replace(sent, formation=2).to_bytes())
    assert tiles.images_of_class == (4, 4, 4, 4)
    with pytest.raises(VirtualDataError, match="exceeds 100 bytes"):
        Overview.of(sent.to_bytes(), 100)


@pytest.mark.parametrize("more", [b"", b"\0", bytes(100)])
def test_bytes_that_are_missing_or_after_the_end_are_refused(more):
    def changed(data):
        return data + more if more else data[:-1]

    sent, content = example().to_bytes(), example().to_safetensors()
    for odd in (
        packed(content + more if more else content[:-1]),
        sent + more if more else sent[:-1],
    ):
        with pytest.raises(VirtualDataError):
            VirtualData.from_bytes(odd)
        with pytest.raises(VirtualDataError, match="ends too"):
            Overview.of(odd)


@given(content=st.binary(max_size=300), zeros=st.integers(0, 3000))
def test_packing_loses_nothing_and_never_costs_more_than_was_told(content, zeros):
    content += bytes(zeros)
    assert len(packed(content)) <= max_packed_size(len(content))
    assert unpacked(packed(content), len(content)) == content
    if content:
        with pytest.raises(VirtualDataError):
            unpacked(packed(content), len(content) - 1)


@pytest.mark.parametrize("formation", [0, -1, 3, 10**6, 10**4000, "2", 2.0, [2]])
def test_a_hostile_formation_is_refused_before_any_tensor_is_made(formation, monkeypatch):
    sent = packed(tampered(about={"formation": formation}))
    monkeypatch.setattr(virtual_data, "load", None)
    with pytest.raises(VirtualDataError, check=at("formation")) as refusal:
        VirtualData.received(sent, replace(BOUNDS, formation=2))
    assert len(str(refusal.value)) < 400


def test_a_formation_is_received_where_it_is_allowed():
    sent = replace(example(), formation=2).to_bytes()
    with pytest.raises(VirtualDataError, check=at("formation", value=2)):
        VirtualData.received(sent, BOUNDS)
    assert len(VirtualData.received(sent, replace(BOUNDS, formation=3)).decoded()) == 16


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/clear_refs")
def test_reading_takes_little_more_memory_than_its_result():
    n = 2**24
    content = virtual(torch.rand(1, 1, 2**12, 2**12), torch.zeros(1).long()).to_safetensors()
    assert n < len(content) < n + 1000

    def memory(what):
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if what in x]
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = memory("VmRSS")
    VirtualData.from_safetensors(content)
    # The copy of the pixels, the images in float32, a chunk in float64: 5.5 times the parcel, and
    # what the process has freed before. It is 16 times where all pixels go through float64 at once.
    assert memory("VmHWM") - before < 10 * n
