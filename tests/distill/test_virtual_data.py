"""What virtual data promises: it survives the wire, and nothing malformed gets in."""

import json
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from flwr_distill.distill import VirtualData, VirtualDataError, virtual_data
from flwr_distill.distill.packing import most_packed, packed, unpacked
from flwr_distill.distill.privacy import privacy_card
from flwr_distill.distill.virtual_header import FORMAT, Bounds, check_announced
from flwr_distill.distill.virtual_overview import Overview


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
    bits=st.integers(1, 8),
)
def test_wire_keeps_everything_but_pixels_below_half_a_level(
    shape: tuple[int, int, int, int], scale: float, offset: float, seed: int, soft: bool, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy((scale * rng.standard_normal(shape) + offset).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 32768, shape[0]))
    soft_labels = torch.from_numpy(rng.random((shape[0], 3), dtype=np.float32)) if soft else None
    sent = virtual(images, labels, soft_labels)
    received = VirtualData.from_bytes(sent.to_bytes(bits))

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


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_noise_takes_no_more_than_its_bits_and_less_where_levels_are_rare(bits: int) -> None:
    def per_pixel(images: Tensor) -> float:
        data = virtual(images, torch.arange(400) % 10)
        return 8 * len(data.to_bytes(bits)) / images.numel()

    generator = torch.Generator().manual_seed(bits)
    noise = torch.rand(400, 1, 16, 16, generator=generator)
    assert bits * 0.98 < per_pixel(noise) < bits * 1.15 + 0.05
    assert per_pixel(noise**8) < 0.8 * bits


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_beyond_a_byte_are_refused(bits: int) -> None:
    with pytest.raises(VirtualDataError, match=f"bits must be from 1 to 8, got {bits}"):
        example().to_bytes(bits)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_valid_data(data: st.DataObject) -> None:
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
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(VirtualDataError, match="not virtual data"):
        VirtualData.from_bytes(example().to_bytes()[:length])


def tampered(
    tensors: dict[str, Tensor] | None = None, about: dict[str, object] | None = None
) -> bytes:
    """Pack a valid example with some tensors or fields replaced."""
    fields = {"scale": 0.1, "offset": 0.0, "method": "dm", "steps": 1, "seed": 0, "init": "noise"}
    return save(
        load(example().to_safetensors()) | (tensors or {}),
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
        ({}, {"formation": "2"}, "formation must be of type int"),
        ({}, {"formation": True}, "formation must be of type int"),
        ({}, {"formation": None}, "formation must be of type int"),
        ({}, {"formation": 10**6}, "formation must be from 1 to 4, got 1000000"),
        ({}, {"card": 1}, "a PrivacyCard has own, start, yardstick"),
        (
            {},
            {"card": {"own": {}, "start": None, "yardstick": None, "guarantee": None}},
            "a Closeness has",
        ),
        ({"samples": torch.zeros(9)}, {}, "'samples'.* has no place"),
        ({}, {"note": "a record"}, "'note'.* has no place"),
        ({}, {"method": "x" * 300}, "method is longer than 200"),
        ({}, {"seed": 10**30}, "seed must be of 64 bits"),
        ({"soft_labels": torch.full((4, 2), torch.nan)}, {}, "soft_labels must be finite"),
        ({"soft_labels": torch.zeros(3, 2)}, {}, "soft_labels must have a shape"),
    ],
)
def test_tampered_content_is_refused_by_name(
    tensors: dict[str, Tensor], about: dict[str, object], complaint: str
) -> None:
    with pytest.raises(VirtualDataError, match=complaint):
        VirtualData.from_safetensors(tampered(tensors, about))


def test_nothing_rides_along_in_the_header() -> None:
    """Nobody reads it, so it would be a way out of a node that lets virtual data leave."""
    tensors = load(example().to_safetensors())
    about = {"format": FORMAT, "scale": 0.1, "offset": 0.0, "method": "dm", "steps": 1}
    text = json.dumps({**about, "seed": 0, "init": "noise"})
    VirtualData.from_safetensors(save(tensors, metadata={"about": text}))
    with pytest.raises(VirtualDataError, match="not as it is written"):
        VirtualData.from_safetensors(save(tensors, metadata={"about": text.replace(" ", "  ")}))
    with pytest.raises(VirtualDataError, match=r"'more'.* has no place"):
        VirtualData.from_safetensors(save(tensors, metadata={"about": text, "more": "a record"}))


def test_other_safetensors_are_refused() -> None:
    with pytest.raises(VirtualDataError, match="not virtual data"):
        VirtualData.from_safetensors(save({"w": torch.zeros(2)}))
    with pytest.raises(VirtualDataError, match="format must be"):
        VirtualData.from_safetensors(
            save(load(example().to_safetensors()), metadata={"about": '{"format": "else"}'})
        )
    with pytest.raises(VirtualDataError, match="must be an object"):
        VirtualData.from_safetensors(
            save(load(example().to_safetensors()), metadata={"about": "[]"})
        )


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


SHAPE, CLASSES = (3, 5, 4), 6
BOUNDS = Bounds(SHAPE, CLASSES, images=4, of_a_class=1)


def test_what_fits_the_bounds_is_received_as_it_is_read() -> None:
    data = example(soft=True).to_bytes()
    received, read = VirtualData.received(data, BOUNDS), VirtualData.from_bytes(data)
    assert torch.equal(received.images, read.images)
    assert torch.equal(received.labels, read.labels)


def test_the_bytes_that_are_allowed_suffice_for_the_largest_honest_data() -> None:
    images = torch.randn(400, *SHAPE)
    data = virtual(images, torch.arange(400) % CLASSES, torch.full((400, CLASSES), 1 / CLASSES))
    sent = data.with_card(images + 1, images[:5]).to_bytes()
    assert len(sent) <= Bounds(SHAPE, CLASSES, images=400, of_a_class=400).num_bytes


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (example(5), "5 virtual images, more than the 4 allowed"),
        (replace(example(), labels=torch.tensor([0, 1, 2, 2])), "2 virtual images of one class"),
        (replace(example(), images=torch.zeros(4, 60, 1, 1)), r"shape \(60, 1, 1\), the task has"),
        (
            replace(example(), soft_labels=torch.full((4, 1000), 1e-3)),
            r"soft_labels of shape \[4, 1000\]",
        ),
    ],
)
def test_what_exceeds_the_bounds_is_refused_before_any_tensor_is_made(
    data: VirtualData, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = data.to_bytes()
    if "of one class" not in complaint:  # which only the labels can tell
        monkeypatch.setattr(virtual_data, "load", None)
    with pytest.raises(VirtualDataError, match=complaint):
        VirtualData.received(sent, BOUNDS)


def test_a_million_images_are_refused_where_forty_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = 2**20
    pixels = torch.zeros(n, 1, 1, 1, dtype=torch.uint8)
    content = tampered({"pixels": pixels, "labels": torch.zeros(n, dtype=torch.int16)})
    bounds = Bounds((1, 1, 1), 10, images=40, of_a_class=40)
    with pytest.raises(VirtualDataError, match="1048576 virtual images, more than the 40"):
        check_announced(content, bounds)
    noise = torch.randint(256, (2**20,), dtype=torch.uint8)
    monkeypatch.setattr(virtual_data, "unpacked", None)
    with pytest.raises(VirtualDataError, match="bytes of virtual data, more than the"):
        VirtualData.received(packed(noise.numpy().tobytes()), bounds)


def test_a_bomb_is_not_unpacked_beyond_its_bounds() -> None:
    bomb = packed(bytes(2**26))
    assert len(bomb) < BOUNDS.num_bytes
    tracemalloc.start()
    with pytest.raises(VirtualDataError, match=r"of more than .* bytes when unpacked"):
        VirtualData.received(bomb, BOUNDS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("soft", [False, True])
def test_an_overview_says_what_the_data_say(soft: bool) -> None:
    sent = example(4, soft)
    found = Overview.of(sent.to_bytes())
    assert found == Overview("dm", "noise", (0, 1, 2, 3), (1, 1, 1, 1))
    packed_twice = Overview.of(replace(sent, formation=2).to_bytes())
    assert packed_twice.images_of_class == (4, 4, 4, 4)
    with pytest.raises(VirtualDataError, match="of more than 100 bytes"):
        Overview.of(sent.to_bytes(), 100)


@pytest.mark.parametrize(
    "tensors",
    [
        {"labels": torch.tensor([0, 1, 2, -1], dtype=torch.int16)},
        {"labels": torch.zeros(4)},
        {"labels": torch.zeros(3, dtype=torch.int16)},
        {"pixels": torch.zeros(4, 3, 5, 4)},
        {"pixels": torch.zeros(4, 0, 5, 4, dtype=torch.uint8)},
        {"samples": torch.zeros(9)},
        {"soft_labels": torch.zeros(3, 2)},
    ],
)
def test_an_overview_refuses_what_is_no_virtual_data(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(VirtualDataError):
        Overview.of(packed(tampered(tensors)))


def test_an_overview_takes_no_header_in_which_something_hides() -> None:
    content = example().to_safetensors()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for text in (json.dumps(header), json.dumps({**header, "more": {}}), "{" + " " * size + "}"):
        odd = text.encode().ljust(-(-len(text) // 8) * 8)
        with pytest.raises(VirtualDataError):
            Overview.of(packed(len(odd).to_bytes(8, "little") + odd + content[8 + size :]))
    for more in (b"", b"\0"):
        with pytest.raises(VirtualDataError, match=r"too (early|late)"):
            Overview.of(packed(content[:-1] + 2 * more))


@pytest.mark.parametrize("more", [b"\0", bytes(100)])
def test_bytes_after_the_end_are_refused(more: bytes) -> None:
    with pytest.raises(VirtualDataError, match="too early or too late"):
        VirtualData.received(example().to_bytes() + more, BOUNDS)
    with pytest.raises(VirtualDataError, match="too late"):
        Overview.of(example().to_bytes() + more)


@given(content=st.binary(max_size=300), zeros=st.integers(0, 3000))
def test_packing_loses_nothing_and_never_costs_more_than_was_told(
    content: bytes, zeros: int
) -> None:
    content += bytes(zeros)
    assert len(packed(content)) <= most_packed(len(content))
    assert unpacked(packed(content), len(content)) == content
    if content:
        with pytest.raises(VirtualDataError):
            unpacked(packed(content), len(content) - 1)


@pytest.mark.parametrize(
    ("formation", "complaint"),
    [
        (0, "have the formation 0, not 1 to 2"),
        (-1, "have the formation -1, not 1 to 2"),
        (3, "have the formation 3, not 1 to 2"),
        (10**6, "have the formation 1000000, not 1 to 2"),
        (10**4000, "have the formation 1"),
        ("2", "formation must be of type int, got '2'"),
        (2.0, "formation must be of type int, got 2.0"),
        ([2], r"formation must be of type int, got \[2\]"),
    ],
)
def test_a_hostile_formation_is_refused_before_any_tensor_is_made(
    formation: object, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = packed(tampered(about={"formation": formation}))
    bounds = replace(BOUNDS, formation=2)
    monkeypatch.setattr(virtual_data, "load", None)
    with pytest.raises(VirtualDataError, match=complaint) as refusal:
        VirtualData.received(sent, bounds)
    assert len(str(refusal.value)) < 200


def test_a_formation_is_received_where_it_is_allowed() -> None:
    sent = replace(example(), formation=2).to_bytes()
    with pytest.raises(VirtualDataError, match="have the formation 2, not 1 to 1"):
        VirtualData.received(sent, BOUNDS)
    assert len(VirtualData.received(sent, replace(BOUNDS, formation=3)).decoded()) == 16


@pytest.mark.parametrize("about", ['"formation"', "[]", "2", "null"])
def test_a_record_of_another_kind_is_refused(about: str) -> None:
    content = save(load(example().to_safetensors()), metadata={"about": about})
    with pytest.raises(VirtualDataError, match="must be an object"):
        VirtualData.received(packed(content), BOUNDS)


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"pixels": 1}', b'{"pixels": {"shape": [[]]}}', b"[" * 10_000]
)
def test_a_header_of_another_kind_is_refused(header: bytes) -> None:
    with pytest.raises(VirtualDataError, match=r"not virtual data|virtual images"):
        VirtualData.received(packed(len(header).to_bytes(8, "little") + header), BOUNDS)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/clear_refs")
def test_reading_takes_little_more_memory_than_its_result() -> None:
    n = 2**24
    content = virtual(torch.rand(1, 1, 2**12, 2**12), torch.zeros(1).long()).to_safetensors()
    assert n < len(content) < n + 1000

    def memory(what: str) -> int:
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if what in x]
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = memory("VmRSS")
    VirtualData.from_safetensors(content)
    # The copy of the pixels, the images in float32, a chunk in float64: 5.5 times the parcel, and
    # what the process has freed before. It is 16 times where all pixels go through float64 at once.
    assert memory("VmHWM") - before < 10 * n
