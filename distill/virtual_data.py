"""Virtual data: the few synthetic images that a node sends instead of its own."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flwr_distill.distill.errors import VirtualDataError, require
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.packing import packed, unpacked
from flwr_distill.distill.privacy import PrivacyCard, privacy_card
from flwr_distill.distill.virtual_header import (
    FORMAT,
    MAX_BYTES,
    MAX_LABEL,
    SAME_DATASET,
    Bounds,
    Header,
    require_columns,
    require_formation,
    require_shape,
)

MAX_VALUE = 20.0
"""Largest pixel size accepted; normalised pixels lie within a few units of 0."""
MAX_MEAN = 5.0
"""Mean size of pixels above which they are not normalised at all."""
MAX_BITS = 8
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class VirtualData:
    """Synthetic labelled images and how they were made.

    Parameters
    ----------
    images, labels : Tensor
        float32 (n, C, H, W) in the task's normalised space, on the CPU, packed as they are sent;
        int64 (n,), each in [0, 32767].
    method, steps, seed, init
        Distiller, optimisation steps, initial seed of its generator, start (see `distill.starts`).
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
            "must have a shape (n, C, H, W) without zeros",
            where="images",
            value=tuple(self.images.shape),
        )
        _require_finite_float32("images", self.images)
        require_formation(self.formation, self.images.shape)
        require(
            self.labels.shape == (n,) and self.labels.dtype == torch.int64,
            f"must be int64 of shape ({n},) to match the images",
            where="labels",
            value=(self.labels.dtype, tuple(self.labels.shape)),
        )
        low, high = int(self.labels.min()), int(self.labels.max())
        within = low >= 0 and high <= MAX_LABEL
        require(within, f"must lie in [0, {MAX_LABEL}]", where="labels", value=(low, high))
        if self.soft_labels is not None:
            require(
                self.soft_labels.ndim == 2 and len(self.soft_labels) == n,
                f"must have a shape ({n}, num_classes)",
                where="soft_labels",
                value=tuple(self.soft_labels.shape),
            )
            _require_finite_float32("soft_labels", self.soft_labels)

    def __len__(self) -> int:
        return len(self.labels)

    def decoded(self) -> "VirtualData":
        """Virtual data to train networks on: small images enlarged to the size of real ones.

        Images, labels and soft labels are `formation` squared times as many, image by image.
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
        """Raise `VirtualDataError` unless the data fits a task's shape (C, H, W) and classes."""
        require_shape(self.images.shape[1:], shape)
        require(
            int(self.labels.max()) < num_classes,
            f"outside the task's classes 0..{num_classes - 1}",
            where="virtual label",
            value=int(self.labels.max()),
            remedy=SAME_DATASET,
        )
        largest = max(abs(float(extreme)) for extreme in self.images.aminmax())
        require(
            largest <= MAX_VALUE,
            f"must be at most {MAX_VALUE:g}; normalised pixels lie near 0",
            where="largest value of virtual images",
            value=largest,
        )
        if self.soft_labels is None:
            return
        require_columns(self.soft_labels.shape[1], num_classes)
        sums = self.soft_labels.sum(dim=1)
        require(
            bool((self.soft_labels >= 0).all()) and torch.allclose(sums, torch.ones(()), atol=1e-3),
            "must be distributions over the classes",
            where="soft_labels",
        )

    def with_card(self, real: Tensor, held_back: Tensor) -> "VirtualData":
        """Copy with the privacy card, measured on decoded images against real and held-back ones.

        Real images are made as coarse first: otherwise a real image shrunk into a tile would not
        count as a copy. Raises DistillError if shapes do not match.
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

    def to_bytes(self, bits: int = MAX_BITS) -> bytes:
        """The output of `to_safetensors`, packed; `bits` of a pixel, 1 to 8 (HFLDD's B_2)."""
        return packed(self.to_safetensors(bits))

    def to_safetensors(self, bits: int = MAX_BITS) -> bytes:
        """Serialise to safetensors, a byte a pixel, of which only the lower `bits` are used.

        Pixels have 2^bits evenly spaced levels from the least to the largest value, so each is
        restored to within (max - min) / 2 / (2^bits - 1). The packing leaves about `bits` bits of
        them, or fewer. Labels are int16; soft labels stay float32. Equal data give equal bytes.
        Single pixels beyond `MAX_VALUE` become that: receivers refuse all of the data for one.
        """
        within = 1 <= bits <= MAX_BITS
        require(within, f"must be from 1 to {MAX_BITS}", where="bits", value=bits)
        images = self.images
        if float(images.abs().mean()) <= MAX_MEAN:
            images = images.clamp(-MAX_VALUE, MAX_VALUE)
        low, high = float(images.min()), float(images.max())
        most = 2**bits - 1
        scale = (high - low) / most
        levels = (images.double() - low) / (scale or 1.0)
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
        """Read and validate what another node sent; raise `VirtualDataError` if anything is wrong.

        Sizes are checked before any tensor is made, so that hostile bytes take no more memory than
        honest ones.
        """
        size, most = len(data), bounds.num_bytes
        require(size <= most, f"more than {most}", where="bytes of virtual data", value=size)
        content = unpacked(data, bounds.unpacked_bytes)
        Header.read(content).check(bounds)
        virtual = cls.from_safetensors(content)
        virtual.validate(bounds.shape, bounds.num_classes)
        largest, most = int(virtual.labels.bincount().max()), bounds.of_a_class
        of_a_class = "virtual images of one class"
        require(largest <= most, f"more than {most}", where=of_a_class, value=largest)
        return virtual

    @classmethod
    def from_bytes(cls, data: bytes, most: int = MAX_BYTES) -> "VirtualData":
        """Read the output of `to_bytes`; all of `data` is checked.

        It may have `most` bytes unpacked (default: 2**30); decoded, they take four times as many.
        Raises `VirtualDataError` if it is malformed in any way, or larger.
        """
        return cls.from_safetensors(unpacked(data, most))

    @classmethod
    def from_safetensors(cls, data: bytes) -> "VirtualData":
        """Read the output of `to_safetensors`; raise `VirtualDataError` if it is malformed."""
        header = Header.read(data)
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise VirtualDataError(f"malformed: {error}", where="virtual data") from error
        return cls(
            images=_decoded(tensors["pixels"], header.scale, header.offset),
            labels=tensors["labels"].long(),
            method=header.method,
            steps=header.steps,
            seed=header.seed,
            init=header.init,
            soft_labels=tensors.get("soft_labels"),
            card=header.card,
            formation=header.formation,
        )


def _require_finite_float32(name: str, tensor: Tensor) -> None:
    right = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    kind = f"{tensor.dtype} on {tensor.device}"
    require(right, "must be float32 on the CPU", where=name, value=kind)
    # Minimum and maximum, unlike isfinite, need no memory of the tensor's size; NaN is in both.
    extremes = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
    require(bool(extremes.isfinite().all()), "must be finite", where=name)


def _decoded(pixels: Tensor, scale: float, offset: float) -> Tensor:
    """Pixels as float32, calculated in float64, a part at a time to save memory."""
    images = torch.empty(pixels.shape)
    levels, values = pixels.reshape(-1), images.view(-1)
    for begin in range(0, len(levels), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        values[part] = levels[part].double().mul_(scale).add_(offset)
    return images
