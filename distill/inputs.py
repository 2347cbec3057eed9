"""Checks of a distiller's arguments."""

import torch
from torch import Tensor

from flwr_distill.distill.errors import DistillError


def check_inputs(
    images: Tensor, labels: Tensor, *, num_classes: int, per_class: int, steps: int | None
) -> None:
    """Raise `DistillError` unless images are finite float32 (n, C, H, W), labels int64 (n,)."""
    for name, value in [("num_classes", num_classes), ("per_class", per_class), ("steps", steps)]:
        if value is not None and value < 1:
            raise DistillError("must be at least 1", where=name, value=value)
    if images.ndim != 4 or images.dtype != torch.float32:
        raise DistillError(
            "must be float32 of shape (n, C, H, W)",
            where="images",
            value=(images.dtype, tuple(images.shape)),
            remedy="convert and reshape them first",
        )
    if images.numel() == 0:
        raise DistillError(
            "empty; a node needs data of its own to distil",
            where="images",
            value=tuple(images.shape),
        )
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        raise DistillError(
            f"must be int64 of shape ({len(images)},), one for each image",
            where="labels",
            value=(labels.dtype, tuple(labels.shape)),
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DistillError(
            f"must lie in 0..{num_classes - 1}",
            where="labels",
            value=(low, high),
            remedy="correct the labels or num_classes",
        )
    broken = int((~images.isfinite()).flatten(1).any(1).sum())
    if broken:
        raise DistillError(
            f"{broken} of {len(images)} contain NaN or infinity",
            where="images",
            remedy="drop those or fix the normalisation",
        )
