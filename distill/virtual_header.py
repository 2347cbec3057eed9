"""The header of virtual data (a packed safetensors file): how they were made, and their shapes.

All of the header is checked: it comes from another node.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from flwr_distill.distill.errors import VirtualDataError, require
from flwr_distill.distill.formation import largest_formation
from flwr_distill.distill.packing import most_packed
from flwr_distill.distill.privacy import PrivacyCard

FORMAT = "flwr-distill/virtual-data/1"
LARGEST = 2**30
"""Most bytes of virtual data, unpacked, where nothing smaller is known."""
LARGEST_HEADER = 2**16
MAX_LABEL = 2**15 - 1
SHAPE_MISMATCH = (
    "virtual images have shape {}, the task has {}; use the same dataset setting on every node"
)
_LONGEST_NAME = 200
_TENSORS = {"pixels": ("U8", 1), "labels": ("I16", 2), "soft_labels": ("F32", 4)}
"""Types of the tensors, as safetensors calls them, and bytes of a number."""
_ABOUT = {"format", "scale", "offset", "method", "steps", "seed", "init", "card", "formation"}
"""Whatever else there is, nobody reads: it would be a way out of a node."""
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The most that virtual data from another node may contain.

    Images of shape (C, H, W), classes of the task, images in all and of one class, and the largest
    formation (an image is trained on as its square).
    """

    shape: tuple[int, ...]
    num_classes: int
    images: int
    of_a_class: int
    formation: int = 1

    @property
    def num_bytes(self) -> int:
        """Most bytes of such data, as they are sent."""
        return most_packed(self.unpacked_bytes)

    @property
    def unpacked_bytes(self) -> int:
        """Most bytes of such data, unpacked: pixels, labels, soft labels and header."""
        return self.images * (math.prod(self.shape) + 2 + 4 * self.num_classes) + LARGEST_HEADER


@dataclass(frozen=True)
class Making:
    """How virtual data were made, as their header says; all of it is checked."""

    scale: float
    offset: float
    method: str
    steps: int
    seed: int
    init: str
    card: PrivacyCard | None
    formation: int

    @classmethod
    def of(cls, header: dict[str, Any], about: dict[str, Any]) -> Self:
        """Check a header and what it says of how the data were made; raise VirtualDataError."""
        version = about.get("format")
        require(version == FORMAT, f"format must be {FORMAT!r}, found {version!r:.50}")
        odd = [*(header.keys() - _TENSORS.keys() - {"__metadata__"}), *(about.keys() - _ABOUT)]
        odd += header["__metadata__"].keys() - {"about"}
        require(not odd, f"{odd[:1]!r:.50} has no place in virtual data")
        canonical = json.dumps(about) == header["__metadata__"]["about"]
        require(canonical, "the record of how it was made is not as it is written")
        scale, offset = _field(about, "scale", float), _field(about, "offset", float)
        card = about.get("card")
        require(
            math.isfinite(scale) and scale >= 0 and math.isfinite(offset),
            f"scale must be finite and >= 0, offset finite; got {scale} and {offset}",
        )
        return cls(
            scale=scale,
            offset=offset,
            method=_name(about, "method"),
            steps=_integer(about, "steps"),
            seed=_integer(about, "seed"),
            init=_name(about, "init"),
            card=None if card is None else PrivacyCard.from_dict(card),
            formation=_formation(about),
        )


def check_announced(data: bytes, bounds: Bounds) -> None:
    """Check formation and shapes in the header, which safetensors holds the tensors to."""
    try:
        header = read_header(data)
        shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        n, *shape = shapes.pop("pixels")
        about = read_about(header)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error!r:.200}") from error
    require(
        isinstance(n, int) and n <= bounds.images,
        f"{n!r:.20} virtual images, more than the {bounds.images} allowed",
    )
    formation = _formation(about)
    require(
        1 <= formation <= bounds.formation,
        f"virtual images have the formation {formation!r:.20}, not 1 to {bounds.formation}",
    )
    require(shape == [*bounds.shape], SHAPE_MISMATCH.format(f"{tuple(shape)}"[:50], bounds.shape))
    fitting = {"labels": [n], "soft_labels": [n, bounds.num_classes]}
    for name, own in shapes.items():
        require(
            fitting.get(name) == own,
            f"{name[:50]} of shape {f'{own}'[:50]} beside {n} virtual images",
        )


def read_header(data: bytes) -> dict[str, Any]:
    """The header of safetensors: its length as 8 little-endian bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, more than {LARGEST_HEADER}")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise TypeError("the header is no object")
    return header


def read_about(header: dict[str, Any]) -> dict[str, Any]:
    """What the header says of how the data were made."""
    about = json.loads(header["__metadata__"]["about"])
    if not isinstance(about, dict):
        raise TypeError("the record of how it was made must be an object")
    return about


def spans(header: dict[str, Any]) -> list[tuple[str, int]]:
    """Names of the tensors and their bytes, in their order, which cover all after the header."""
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if missing := {"pixels", "labels"} - tensors.keys():
        raise KeyError(min(missing))
    n, *shape = tensors["pixels"]["shape"]
    columns = tensors.get("soft_labels", {"shape": [n, 1]})["shape"][-1]
    shapes = {"pixels": [n, *shape], "labels": [n], "soft_labels": [n, columns]}
    if len(shape) != 3 or not all(type(d) is int and d > 0 for d in (n, *shape, columns)):
        raise ValueError("images must have a shape (n, C, H, W) without zeros")
    spans, begin = [], 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, num_bytes = _TENSORS[name]
        size = num_bytes * math.prod(shapes[name])
        offsets = [begin, begin + size]
        if entry != {"dtype": dtype, "shape": shapes[name], "data_offsets": offsets}:
            raise ValueError(f"{name} is not a tensor {dtype} of shape {shapes[name]}")
        spans.append((name, size))
        begin += size
    return spans


def require_formation(formation: int, shape: Sequence[int]) -> None:
    """Check that images (C, H, W) can be of a formation."""
    most = largest_formation(shape)
    require(1 <= formation <= most, f"formation must be from 1 to {most}, got {formation!r:.20}")


def _formation(about: dict[str, Any]) -> int:
    return _field(about, "formation", int) if "formation" in about else 1


def _name(about: dict[str, Any], name: str) -> str:
    value = _field(about, name, str)
    require(len(value) <= _LONGEST_NAME, f"{name} is longer than {_LONGEST_NAME} characters")
    return value


def _integer(about: dict[str, Any], name: str) -> int:
    value = _field(about, name, int)
    require(abs(value) < 2**64, f"{name} must be of 64 bits")
    return value


def _field(about: dict[str, Any], name: str, kind: type[T]) -> T:
    value = about.get(name)
    if type(value) is not kind:
        raise VirtualDataError(f"{name} must be of type {kind.__name__}, got {value!r:.50}")
    return value
