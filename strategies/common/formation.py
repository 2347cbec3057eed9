"""The formation of a run's virtual images, from its setting."""

from collections.abc import Sequence

from flwr_distill.distill.formation import best_formation, largest_formation
from flwr_distill.task.errors import SettingsError


def chosen_formation(setting: str, formation: int, shape: Sequence[int]) -> int:
    """`formation`, or for 0 that for images of shape (C, H, W).

    Raises
    ------
    SettingsError
        If images have no room for it; names `setting`.
    """
    most = largest_formation(shape)
    if formation > most:
        raise SettingsError(
            f"{setting} = {formation}, but samples are of shape {tuple(shape)} "
            f"(set it to at most {most}, or 0 to have it chosen)"
        )
    return formation or best_formation(shape)
