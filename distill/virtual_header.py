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
from flwr_distill.distill.packing import max_packed_size
from flwr_distill.distill.privacy import PrivacyCard

FORMAT = "flwr-distill/virtual-data/1"
MAX_BYTES = 2**30
"""Most bytes of virtual data, unpacked, where nothing smaller is known."""
MAX_HEADER = 2**16
MAX_LABEL = 2**15 - 1
SAME_DATASET = "use the same dataset setting on every node"
_MAX_NAME = 200
_TENSORS = {"pixels": ("U8", 1), "labels": ("I16", 2), "soft_labels": ("F32", 4)}
"""Types of the tensors, as safetensors calls them, and bytes of a number."""
_ABOUT = {"format", "scale", "offset", "method", "steps", "seed", "init", "card", "formation"}
"""All other keys are refused: nobody reads them, so they would be a way out of a node."""
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
        return max_packed_size(self.unpacked_bytes)

    @property
    def unpacked_bytes(self) -> int:
        """Most bytes of such data, unpacked: pixels, labels, soft labels and header."""
        return self.images * (math.prod(self.shape) + 2 + 4 * self.num_classes) + MAX_HEADER


@dataclass(frozen=True)
class Header:
    """How virtual data were made, and their tensors.

    `shape` is (n, C, H, W), `columns` those of soft labels, if any; `spans` are names and bytes of
    the tensors in their order, which cover all after the header.
    """

    shape: tuple[int, ...]
    columns: int | None
    spans: list[tuple[str, int]]
    scale: float
    offset: float
    method: str
    steps: int
    seed: int
    init: str
    card: PrivacyCard | None
    formation: int

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read the header that `data` begins with: its length in 8 bytes, then JSON."""
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length]
        try:
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes, more than {MAX_HEADER}")
            header = _object(text)
            about = _object(header["__metadata__"]["about"])
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            shape, columns, spans = _layout(tensors)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise VirtualDataError(f"malformed: {error!r:.200}", where="virtual data") from error
        version = about.get("format")
        require(version == FORMAT, f"must be {FORMAT!r}", where="format", value=version)
        odd = [*(about.keys() - _ABOUT), *(header["__metadata__"].keys() - {"about"})]
        require(not odd, "has no place in virtual data", where="header", value=odd[:1])
        written = json.dumps(header, separators=(",", ":")).encode()
        canonical = json.dumps(about) == header["__metadata__"]["about"]
        canonical &= text == written.ljust(-(-len(written) // 8) * 8)
        require(canonical, "must be as safetensors and json write it", where="header")
        scale, offset = _field(about, "scale", float), _field(about, "offset", float)
        require(math.isfinite(scale) and scale >= 0, "must be >= 0", where="scale", value=scale)
        require(math.isfinite(offset), "must be finite", where="offset", value=offset)
        formation = _field(about, "formation", int) if "formation" in about else 1
        require_formation(formation, shape)
        card = about.get("card")
        return cls(
            shape=shape,
            columns=columns,
            spans=spans,
            scale=scale,
            offset=offset,
            method=_name(about, "method"),
            steps=_integer(about, "steps"),
            seed=_integer(about, "seed"),
            init=_name(about, "init"),
            card=None if card is None else PrivacyCard.from_dict(card),
            formation=formation,
        )

    def check(self, bounds: Bounds) -> None:
        """Check number, formation and shapes, which safetensors enforces on the tensors."""
        n, *shape = self.shape
        require(n <= bounds.images, f"more than {bounds.images}", where="virtual images", value=n)
        within = self.formation <= bounds.formation
        most = f"must be from 1 to {bounds.formation}"
        require(within, most, where="formation", value=self.formation)
        require_shape(shape, bounds.shape)
        if self.columns is not None:
            require_columns(self.columns, bounds.num_classes)


def require_formation(formation: int, shape: Sequence[int]) -> None:
    """Check that images (..., H, W) can be of a formation."""
    most = largest_formation(shape)
    within = 1 <= formation <= most
    require(within, f"must be from 1 to {most}", where="formation", value=formation)


def require_shape(shape: Sequence[int], expected: Sequence[int]) -> None:
    """Check that virtual images have the task's shape (C, H, W)."""
    require(
        tuple(shape) == tuple(expected),
        f"the task has {tuple(expected)}",
        where="shape of virtual images",
        value=tuple(shape),
        remedy=SAME_DATASET,
    )


def require_columns(columns: int, num_classes: int) -> None:
    """Check that soft labels have a column for each class of the task."""
    problem = f"must be {num_classes}, one for each class of the task"
    require(columns == num_classes, problem, where="columns of soft_labels", value=columns)


def _object(text: str | bytes) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    return content


def _layout(tensors: dict[str, Any]) -> tuple[tuple[int, ...], int | None, list[tuple[str, int]]]:
    """Shape of the images, columns of the soft labels, and spans; see `Header`."""
    n, *shape = tensors["pixels"]["shape"]
    columns = tensors["soft_labels"]["shape"][-1] if "soft_labels" in tensors else None
    shapes = {"pixels": [n, *shape], "labels": [n], "soft_labels": [n, columns]}
    if len(shape) != 3 or not all(type(d) is int and d > 0 for d in (n, *shape, columns or 1)):
        raise ValueError("images must have a shape (n, C, H, W) without zeros")
    tensors["labels"]  # must be there
    spans, begin = [], 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, num_bytes = _TENSORS[name]
        size = num_bytes * math.prod(shapes[name])
        offsets = [begin, begin + size]
        if entry != {"dtype": dtype, "shape": shapes[name], "data_offsets": offsets}:
            raise ValueError(f"{name} must be a tensor {dtype} of shape {shapes[name]}")
        spans.append((name, size))
        begin += size
    return (n, *shape), columns, spans


def _name(about: dict[str, Any], name: str) -> str:
    value = _field(about, name, str)
    require(len(value) <= _MAX_NAME, f"longer than {_MAX_NAME}", where=name, value=value)
    return value


def _integer(about: dict[str, Any], name: str) -> int:
    value = _field(about, name, int)
    require(abs(value) < 2**64, "must be of 64 bits", where=name, value=value)
    return value


def _field(about: dict[str, Any], name: str, kind: type[T]) -> T:
    value = about.get(name)
    if type(value) is not kind:
        raise VirtualDataError(f"must be of type {kind.__name__}", where=name, value=value)
    return value
