"""Checks of a distiller's arguments."""

import torch
from torch import Tensor

from flwr_distill.distill.errors import DistillError


def check_inputs(
    images: Tensor, labels: Tensor, *, num_classes: int, per_class: int, steps: int
) -> None:
    """Raise `DistillError` unless images are finite float32 (n, C, H, W), labels int64 (n,)."""
    for name, value in [("num_classes", num_classes), ("per_class", per_class), ("steps", steps)]:
        if value < 1:
            raise DistillError(f"{name} must be at least 1, got {value}")
    if images.ndim != 4 or images.dtype != torch.float32:
        raise DistillError(
            "images must be float32 of shape (n, C, H, W), "
            f"got {images.dtype} of shape {tuple(images.shape)}; convert and reshape them first"
        )
    if images.numel() == 0:
        raise DistillError(
            f"images are empty, shape {tuple(images.shape)}; a node needs data of its own to distil"
        )
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        raise DistillError(
            f"labels must be int64 of shape ({len(images)},), one for each image, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DistillError(
            f"labels must lie in 0..{num_classes - 1}, got {low} to {high}; "
            "correct the labels or num_classes"
        )
    broken = int((~images.isfinite()).flatten(1).any(1).sum())
    if broken:
        raise DistillError(
            f"images hold NaN or infinity in {broken} of {len(images)}; "
            "drop those or fix the normalisation"
        )
