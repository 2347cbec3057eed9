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
    LARGEST,
    MAX_LABEL,
    SHAPE_MISMATCH,
    Bounds,
    Making,
    check_announced,
    read_about,
    read_header,
    require_formation,
)

LARGEST_VALUE = 20.0
"""Largest pixel size accepted; normalised pixels lie within a few units of 0."""
MOST_BITS = 8
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class VirtualData:
    """Synthetic labelled images and how they were made.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W) in the task's normalised space, on the CPU; packed, as they are sent.
    labels : Tensor
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
            f"images must have a shape (n, C, H, W) without zeros, got {tuple(self.images.shape)}",
        )
        _require_finite_float32("images", self.images)
        require_formation(self.formation, self.images.shape)
        require(
            self.labels.shape == (n,) and self.labels.dtype == torch.int64,
            f"labels must be int64 of shape ({n},) to match the images, "
            f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}",
        )
        low, high = int(self.labels.min()), int(self.labels.max())
        require(
            low >= 0 and high <= MAX_LABEL,
            f"labels must lie in [0, {MAX_LABEL}], got {low} to {high}",
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
        got = tuple(self.images.shape[1:])
        require(got == tuple(shape), SHAPE_MISMATCH.format(got, tuple(shape)))
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
        """Copy with the privacy card, measured against real and held-back images (m, C, H, W).

        It is measured on the decoded images, which are what can look like a person's. Real images
        are made as coarse first: otherwise a real image shrunk into a tile would not count as a
        copy. Raises DistillError if shapes do not match.
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
        """The output of `to_safetensors`, packed; `bits` of a pixel, 1 to 8 (HFLDD's B_2)."""
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
        """Read and validate what another node sent; raise `VirtualDataError` if anything is wrong.

        Sizes are checked before any tensor is made, so that hostile bytes take no more memory than
        honest ones.
        """
        require(
            len(data) <= bounds.num_bytes,
            f"{len(data)} bytes of virtual data, more than the {bounds.num_bytes} allowed",
        )
        content = unpacked(data, bounds.unpacked_bytes)
        check_announced(content, bounds)
        virtual = cls.from_safetensors(content)
        virtual.validate(bounds.shape, bounds.num_classes)
        of_a_class = int(virtual.labels.bincount().max())
        require(
            of_a_class <= bounds.of_a_class,
            f"{of_a_class} virtual images of one class, more than the {bounds.of_a_class} allowed",
        )
        return virtual

    @classmethod
    def from_bytes(cls, data: bytes, most: int = LARGEST) -> "VirtualData":
        """Read the output of `to_bytes`; all of `data` is checked.

        It may have `most` bytes unpacked (default: 2**30); decoded, they take four times as many.
        Raises `VirtualDataError` if it is malformed in any way, or larger.
        """
        return cls.from_safetensors(unpacked(data, most))

    @classmethod
    def from_safetensors(cls, data: bytes) -> "VirtualData":
        """Read the output of `to_safetensors`; raise `VirtualDataError` if it is malformed."""
        try:
            header = read_header(data)
            about = read_about(header)
            tensors = load(data)
            pixels, labels = tensors["pixels"], tensors["labels"]
            soft_labels = tensors.get("soft_labels")
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error!r}") from error
        made = Making.of(header, about)
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


def _require_finite_float32(name: str, tensor: Tensor) -> None:
    require(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu",
        f"{name} must be float32 on the CPU, got {tensor.dtype} on {tensor.device}",
    )
    # Minimum and maximum, unlike isfinite, need no memory of the tensor's size; NaN is in both.
    extremes = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
    require(bool(extremes.isfinite().all()), f"{name} must be finite, found NaN or infinity")


def _decoded(pixels: Tensor, scale: float, offset: float) -> Tensor:
    """Pixels as float32, calculated in float64, a part at a time to save memory."""
    images = torch.empty(pixels.shape)
    levels, values = pixels.reshape(-1), images.view(-1)
    for begin in range(0, len(levels), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        values[part] = levels[part].double().mul_(scale).add_(offset)
    return images
