"""Virtual data: the few synthetic images that a node sends instead of its own."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flwr_distill.distill.errors import VirtualDataError, require
from flwr_distill.distill.formation import Formation, largest_formation
from flwr_distill.distill.packing import most_packed, packed, unpacked, unpacked_parts
from flwr_distill.distill.privacy import PrivacyCard, privacy_card

FORMAT = "flwr-distill/virtual-data/1"
LARGEST_VALUE = 20.0
"""Largest pixel size accepted; normalised pixels lie within a few units of 0."""
_SHAPE_MISMATCH = (
    "virtual images have shape {}, the task has {}; use the same dataset setting on every node"
)
_MAX_LABEL = torch.iinfo(torch.int16).max
MOST_BITS = 8
_LARGEST_HEADER = 2**16
_LONGEST_NAME = 200
_TENSORS = {"pixels": ("U8", 1), "labels": ("I16", 2), "soft_labels": ("F32", 4)}
"""Types of the tensors, as safetensors calls them, and bytes of a number."""
_ABOUT = {"format", "scale", "offset", "method", "steps", "seed", "init", "card", "formation"}
"""Whatever else there is, nobody reads: it would be a way out of a node."""
_LARGEST = 2**30
"""Most bytes of virtual data, unpacked, where nothing smaller is known."""
_CHUNK = 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The most that virtual data from another node may hold.

    Parameters
    ----------
    shape : tuple of int
        (C, H, W) of every image.
    num_classes : int
        Classes of the task.
    images : int
        Most images.
    of_a_class : int
        Most images of one class.
    formation : int (default: 1)
        Largest formation; an image is trained on as its square.
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
        return self.images * (math.prod(self.shape) + 2 + 4 * self.num_classes) + _LARGEST_HEADER


@dataclass(frozen=True)
class Overview:
    """What virtual data say of themselves: all but the images.

    `labels` are those of the classes shown, in order, `images_of_class` the images of each, small
    ones (`distill.formation`) counted singly.
    """

    method: str
    init: str
    labels: tuple[int, ...]
    images_of_class: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes, most: int = _LARGEST) -> Self:
        """Read the output of `VirtualData.to_bytes` in a few MB of memory, however large it is.

        All of `data` is checked but the soft labels' numbers, which any reader checks: nothing
        that has no place in virtual data passes.

        Parameters
        ----------
        most : int (default: 2**30)
            Bytes that they may have unpacked.

        Raises
        ------
        VirtualDataError
            If `data` is truncated or malformed, or larger.
        """
        content = _Stream(unpacked_parts(data, most))
        size = content.read(8)
        text = content.read(min(int.from_bytes(size, "little"), _LARGEST_HEADER))
        try:
            header = _header(size + text)
            about = _about(header)
            spans = _spans(header)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error!r}") from error
        written = json.dumps(header, separators=(",", ":")).encode()
        plain = text == written.ljust(-(-len(written) // 8) * 8)
        require(plain, "the header is not as safetensors writes it")
        made = _Making.of(header, about)
        _require_formation(made.formation, header["pixels"]["shape"][1:])
        counts = np.zeros(_MAX_LABEL + 1, np.int64)
        for name, num_bytes in spans:
            for part in content.parts(num_bytes):
                if name == "labels":
                    labels = np.frombuffer(part, "<i2")
                    require(labels.min() >= 0, f"labels must lie in [0, {_MAX_LABEL}]")
                    counts += np.bincount(labels, minlength=len(counts))
        content.end()
        shown = counts.nonzero()[0]
        images = counts[shown] * made.formation**2
        return cls(made.method, made.init, tuple(shown.tolist()), tuple(images.tolist()))


@dataclass(frozen=True, eq=False)
class VirtualData:
    """Synthetic labelled images and how they were made.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W) in the task's normalised space, on the CPU; packed, as they are sent.
    labels : Tensor
        int64 (n,), each in [0, 32767].
    method : str
        Name of the distiller.
    steps : int
        Number of optimisation steps.
    seed : int
        Initial seed of the generator of all random draws.
    init : str
        How the images were initialised (see `distill.starts`).
    soft_labels : Tensor, optional (default: None)
        float32 (n, num_classes), if the method learns labels too.
    card : PrivacyCard, optional (default: None)
        What the images reveal about single real ones, if measured.
    initial_images : Tensor, optional (default: None)
        The images before the first step, for the card; not sent.
    formation : int (default: 1)
        Smaller images along each side of an image, see `distill.formation`. Networks are trained on
        `decoded` images.

    Raises
    ------
    VirtualDataError
        If a tensor has the wrong type, shape or range, or contains NaN or infinity.
    """

    images: Tensor
    labels: Tensor
    method: str
    steps: int
    seed: int
    init: str
    soft_labels: Tensor | None = None
    card: PrivacyCard | None = None
    initial_images: Tensor | None = None
    formation: int = 1

    def __post_init__(self) -> None:
        n = len(self.images) if self.images.ndim else 0
        require(
            self.images.ndim == 4 and self.images.numel() > 0,
            f"images must have a shape (n, C, H, W) without zeros, got {tuple(self.images.shape)}",
        )
        _require_finite_float32("images", self.images)
        _require_formation(self.formation, self.images.shape)
        require(
            self.labels.shape == (n,) and self.labels.dtype == torch.int64,
            f"labels must be int64 of shape ({n},) to match the images, "
            f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}",
        )
        low, high = int(self.labels.min()), int(self.labels.max())
        require(
            low >= 0 and high <= _MAX_LABEL,
            f"labels must lie in [0, {_MAX_LABEL}], got {low} to {high}",
        )
        if self.soft_labels is not None:
            require(
                self.soft_labels.ndim == 2 and len(self.soft_labels) == n,
                f"soft_labels must have a shape ({n}, num_classes), "
                f"got {tuple(self.soft_labels.shape)}",
            )
            _require_finite_float32("soft_labels", self.soft_labels)

    def __len__(self) -> int:
        return len(self.labels)

    def decoded(self) -> "VirtualData":
        """What networks are trained on: each small image enlarged to the size of a real one.

        Images, labels and soft labels are `formation` squared times as many, image by image; the
        result's own formation is 1.
        """
        if self.formation == 1:
            return self
        formation = Formation.of(self.formation, self.images.shape)
        soft_labels, start = self.soft_labels, self.initial_images
        return replace(
            self,
            images=formation.decode(self.images),
            labels=formation.repeated(self.labels),
            soft_labels=None if soft_labels is None else formation.repeated(soft_labels),
            initial_images=None if start is None else formation.decode(start),
            formation=1,
        )

    def validate(self, shape: Sequence[int], num_classes: int) -> None:
        """Check that the data fits a task with image shape (C, H, W) and its classes.

        Raises
        ------
        VirtualDataError
            Names what does not fit.
        """
        got = tuple(self.images.shape[1:])
        require(got == tuple(shape), _SHAPE_MISMATCH.format(got, tuple(shape)))
        high = int(self.labels.max())
        require(
            high < num_classes,
            f"virtual label {high} is outside the task's classes 0..{num_classes - 1}; "
            "use the same dataset setting on every node",
        )
        largest = max(abs(float(extreme)) for extreme in self.images.aminmax())
        require(
            largest <= LARGEST_VALUE,
            f"virtual images have a value of size {largest:.3g}, above {LARGEST_VALUE:g}; "
            "normalised pixels lie near 0",
        )
        if self.soft_labels is None:
            return
        require(
            self.soft_labels.shape[1] == num_classes,
            f"soft_labels must have {num_classes} columns, one for each class of the task",
        )
        sums = self.soft_labels.sum(dim=1)
        require(
            bool((self.soft_labels >= 0).all()) and torch.allclose(sums, torch.ones(()), atol=1e-3),
            "soft_labels must be distributions over the classes",
        )

    def with_card(self, real: Tensor, held_back: Tensor) -> "VirtualData":
        """Return a copy with the privacy card measured.

        It is measured on the decoded images, which are what can look like a person's. Real images
        are made as coarse as these first: otherwise a real image shrunk into a tile, which shows
        whom it shows, would not count as a copy. The packed image is like no real one.

        Parameters
        ----------
        real : Tensor
            Images that this data was made from, (m, C, H, W), m >= 1, on any device.
        held_back : Tensor
            Real images not used in making it, (k, C, H, W), k >= 0.

        Raises
        ------
        DistillError
            If shapes do not match.
        """
        decoded = self.decoded()
        images = decoded.images.to(real.device)
        card = privacy_card(
            images,
            real,
            start=decoded.initial_images,
            held_back=held_back,
            formation=Formation.of(self.formation, images.shape, images.device),
        )
        return replace(self, card=card)

    def to_bytes(self, bits: int = MOST_BITS) -> bytes:
        """Serialise as it is sent: the output of `to_safetensors`, packed without loss.

        Parameters
        ----------
        bits : int (default: 8)
            Of a pixel, 1 to 8 (HFLDD's B_2).
        """
        return packed(self.to_safetensors(bits))

    def to_safetensors(self, bits: int = MOST_BITS) -> bytes:
        """Serialise to safetensors, a byte a pixel, of which only the lower `bits` are used.

        Pixels have 2^bits evenly spaced levels from the least to the largest value, so each is
        restored to within (max - min) / 2 / (2^bits - 1). The packing leaves about `bits` bits of
        them, or fewer. Labels are int16; soft labels stay float32. Equal data give equal bytes.
        """
        require(1 <= bits <= MOST_BITS, f"bits must be from 1 to {MOST_BITS}, got {bits}")
        low, high = float(self.images.min()), float(self.images.max())
        most = 2**bits - 1
        scale = (high - low) / most
        levels = (self.images.double() - low) / (scale or 1.0)
        tensors = {
            "pixels": levels.round().clamp(0, most).to(torch.uint8).contiguous(),
            "labels": self.labels.to(torch.int16).contiguous(),
        }
        if self.soft_labels is not None:
            tensors["soft_labels"] = self.soft_labels.contiguous()
        about = {
            "format": FORMAT,
            "scale": scale,
            "offset": low,
            "method": self.method,
            "steps": self.steps,
            "seed": self.seed,
            "init": self.init,
            "card": asdict(self.card) if self.card else None,
        }
        if self.formation > 1:  # without it, the bytes are those of versions that knew none
            about["formation"] = self.formation
        # A single entry, because safetensors writes several in random order.
        return save(tensors, metadata={"about": json.dumps(about)})

    @classmethod
    def received(cls, data: bytes, bounds: Bounds) -> "VirtualData":
        """Read and validate what another node sent.

        Sizes are checked before any tensor is made, so that hostile bytes take no more memory than
        honest ones.

        Raises
        ------
        VirtualDataError
            If `data` is malformed, exceeds the bounds or does not fit the task.
        """
        require(
            len(data) <= bounds.num_bytes,
            f"{len(data)} bytes of virtual data, more than the {bounds.num_bytes} allowed",
        )
        content = unpacked(data, bounds.unpacked_bytes)
        _check_announced(content, bounds)
        virtual = cls.from_safetensors(content)
        virtual.validate(bounds.shape, bounds.num_classes)
        of_a_class = int(virtual.labels.bincount().max())
        require(
            of_a_class <= bounds.of_a_class,
            f"{of_a_class} virtual images of one class, more than the {bounds.of_a_class} allowed",
        )
        return virtual

    @classmethod
    def from_bytes(cls, data: bytes, most: int = _LARGEST) -> "VirtualData":
        """Read the output of `to_bytes`; all of `data` is checked.

        Parameters
        ----------
        most : int (default: 2**30)
            Bytes that they may have unpacked; decoded, they take four times as many.

        Raises
        ------
        VirtualDataError
            If `data` is truncated or malformed in any way, or larger.
        """
        return cls.from_safetensors(unpacked(data, most))

    @classmethod
    def from_safetensors(cls, data: bytes) -> "VirtualData":
        """Read the output of `to_safetensors`; all of `data` is checked.

        Raises
        ------
        VirtualDataError
            If `data` is truncated or malformed in any way.
        """
        try:
            header = _header(data)
            about = _about(header)
            tensors = load(data)
            pixels, labels = tensors["pixels"], tensors["labels"]
            soft_labels = tensors.get("soft_labels")
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error!r}") from error
        made = _Making.of(header, about)
        require(pixels.dtype == torch.uint8, f"pixels must be uint8, got {pixels.dtype}")
        require(labels.dtype == torch.int16, f"labels must be int16, got {labels.dtype}")
        return cls(
            images=_decoded(pixels, made.scale, made.offset),
            labels=labels.long(),
            method=made.method,
            steps=made.steps,
            seed=made.seed,
            init=made.init,
            soft_labels=soft_labels,
            card=made.card,
            formation=made.formation,
        )


@dataclass(frozen=True)
class _Making:
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


class _Stream:
    """Reads parts of any size as bytes of the sizes that are asked for."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        found = [self._rest]
        missing = size - len(self._rest)
        while missing > 0:
            part = next(self._parts, b"")
            require(bool(part), "virtual data that end too early")
            found.append(part)
            missing -= len(part)
        content = b"".join(found)
        self._rest = content[size:]
        return content[:size]

    def parts(self, size: int) -> Iterator[bytes]:
        """So many bytes in parts of an even size."""
        for begin in range(0, size, _CHUNK):
            yield self.read(min(_CHUNK, size - begin))

    def end(self) -> None:
        """Check that all was read, to the last part."""
        require(not self._rest and not any(self._parts), "virtual data that end too late")


def _spans(header: dict[str, Any]) -> list[tuple[str, int]]:
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


def _require_formation(formation: int, shape: Sequence[int]) -> None:
    most = largest_formation(shape)
    require(1 <= formation <= most, f"formation must be from 1 to {most}, got {formation!r:.20}")


def _require_finite_float32(name: str, tensor: Tensor) -> None:
    require(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu",
        f"{name} must be float32 on the CPU, got {tensor.dtype} on {tensor.device}",
    )
    # Minimum and maximum, unlike isfinite, need no memory of the tensor's size; NaN is in both.
    extremes = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
    require(bool(extremes.isfinite().all()), f"{name} must be finite, found NaN or infinity")


def _header(data: bytes) -> dict[str, Any]:
    """The header of safetensors: its length as 8 little-endian bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if length > _LARGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, more than {_LARGEST_HEADER}")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise TypeError("the header is no object")
    return header


def _about(header: dict[str, Any]) -> dict[str, Any]:
    """What the header says of how the data were made."""
    about = json.loads(header["__metadata__"]["about"])
    if not isinstance(about, dict):
        raise TypeError("the record of how it was made must be an object")
    return about


def _check_announced(data: bytes, bounds: Bounds) -> None:
    """Check formation and shapes in the header, which safetensors holds the tensors to."""
    try:
        header = _header(data)
        shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        n, *shape = shapes.pop("pixels")
        about = _about(header)
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
    require(shape == [*bounds.shape], _SHAPE_MISMATCH.format(f"{tuple(shape)}"[:50], bounds.shape))
    fitting = {"labels": [n], "soft_labels": [n, bounds.num_classes]}
    for name, own in shapes.items():
        require(
            fitting.get(name) == own,
            f"{name[:50]} of shape {f'{own}'[:50]} beside {n} virtual images",
        )


def _decoded(pixels: Tensor, scale: float, offset: float) -> Tensor:
    """Pixels as float32, calculated in float64, a part at a time to save memory."""
    images = torch.empty(pixels.shape)
    levels, values = pixels.reshape(-1), images.view(-1)
    for begin in range(0, len(levels), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        values[part] = levels[part].double().mul_(scale).add_(offset)
    return images


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
