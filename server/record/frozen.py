"""The frozen part of a run's model, written once: its checkpoints have what trains."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from flwr_distill.base.files import replacing

FILE = "frozen.safetensors"


def save_frozen(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights into a run's folder; no file if there are none."""
    if not weights:
        return
    with replacing(folder / FILE) as partial:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, partial)


def load_frozen(folder: Path) -> dict[str, Tensor]:
    """The weights in a run's folder; empty if there is no file."""
    file = folder / FILE
    return load_file(file) if file.is_file() else {}
