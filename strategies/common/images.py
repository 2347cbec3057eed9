"""Methods that need images, and the formation of a run's virtual ones."""

from collections.abc import Sequence

from flwr_distill.distill.formation import best_formation, largest_formation
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError


def require_images(spec: DataSpec, strategy: str, *, or_tables: bool = False) -> None:
    """Raise SettingsError if the data are texts, whose words a distiller would move like pixels.

    Or tables, unless `or_tables` is set.
    """
    if spec.kind == "text" or (spec.kind == "table" and not or_tables):
        raise SettingsError(
            f"{spec.name!r} contains {spec.kind}s, which cannot be distilled",
            where="strategy",
            value=strategy,
            remedy="take another strategy",
        )


def chosen_formation(setting: str, formation: int, shape: Sequence[int]) -> int:
    """`formation`, or for 0 that for images of shape (C, H, W).

    Raises SettingsError if images are too small for it; names `setting`.
    """
    most = largest_formation(shape)
    if formation > most:
        raise SettingsError(
            f"samples are of shape {tuple(shape)}",
            where=setting,
            value=formation,
            remedy=f"set it to at most {most}, or 0 to have it chosen",
        )
    return formation or best_formation(shape)
