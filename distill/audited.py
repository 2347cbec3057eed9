"""What attacks found in virtual data of each kind: numbers of ``python -m benchmarks.audit``.

Of digits in three classes, by the strongest attack on each (docs/privacy.md); ``flwr-distill
audit`` measures other data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flwr_distill.distill.features import are_vectors
from flwr_distill.distill.virtual_data import VirtualData


class Kind(NamedTuple):
    """Virtual data that were audited: `per_class` images from `real` real ones of each class."""

    distiller: str
    start: str
    formation: int
    per_class: int
    real: int


class Audited(NamedTuple):
    """Shares of the real images found where 0.1 % of others are accused falsely.

    `ordinary` of usual images; `worst` of those that are found most easily: wrongly labelled,
    unlike all others, or there twice.
    """

    ordinary: float
    worst: float

    @property
    def alarming(self) -> bool:
        """Whether more are found than is usual for the better kinds of virtual data."""
        return self.ordinary >= MAX_ORDINARY or self.worst >= MAX_WORST

    def numbers(self) -> dict[str, float]:
        """As metrics of a reply."""
        return {"audited-ordinary": self.ordinary, "audited-worst": self.worst}

    def __str__(self) -> str:
        return (
            "an attacker who accuses 0.1 % of others falsely finds "
            f"{self.ordinary:.1%} of ordinary images and {self.worst:.0%} of the most unusual ones "
            "in virtual data of this kind"
        )


MAX_ORDINARY, MAX_WORST = 0.01, 0.1
MEASURED: dict[Kind, Audited] = {
    Kind("dm", "class-stats", 1, 1, 71): Audited(0.004, 0.044),
    Kind("dm", "real", 1, 1, 71): Audited(0.003, 0.025),
    Kind("kip", "class-stats", 1, 1, 71): Audited(0.003, 0.070),
    Kind("kip", "real", 1, 1, 71): Audited(0.003, 0.052),
    Kind("kip-negatives", "class-stats", 1, 1, 71): Audited(0.003, 0.301),
    Kind("dm", "class-stats", 1, 10, 71): Audited(0.047, 0.912),
    Kind("dm", "real", 1, 10, 71): Audited(0.082, 0.587),
    Kind("kip", "class-stats", 1, 10, 71): Audited(0.026, 0.818),
    Kind("kip-negatives", "class-stats", 1, 10, 71): Audited(0.023, 0.985),
    Kind("dm", "class-stats", 1, 50, 71): Audited(0.111, 0.997),
    Kind("kip", "class-stats", 1, 50, 71): Audited(0.040, 0.976),
    Kind("dm", "class-stats", 2, 1, 71): Audited(0.004, 0.022),
    Kind("dm", "class-stats", 2, 10, 71): Audited(0.007, 0.260),
    Kind("dm", "class-stats", 1, 1, 5): Audited(0.887, 1.000),
    Kind("dm", "class-stats", 1, 10, 5): Audited(1.000, 1.000),
    Kind("dm", "class-stats", 1, 1, 10): Audited(0.271, 0.891),
    Kind("dm", "class-stats", 1, 10, 10): Audited(0.983, 1.000),
    Kind("dm", "class-stats", 1, 1, 20): Audited(0.040, 0.426),
    Kind("dm", "class-stats", 1, 10, 20): Audited(0.714, 1.000),
    Kind("kip", "class-stats", 1, 10, 20): Audited(0.088, 1.000),
    # By three of the attacks alone, so that these are lower bounds.
    Kind("dm", "real", 1, 50, 71): Audited(0.453, 0.829),
    Kind("kip", "real", 1, 50, 71): Audited(0.196, 1.000),
    Kind("kip-negatives", "class-stats", 1, 50, 71): Audited(0.070, 1.000),
    Kind("kip-negatives", "real", 1, 50, 71): Audited(0.196, 1.000),
    Kind("dm", "real", 2, 10, 71): Audited(0.007, 0.086),
    Kind("kip", "class-stats", 1, 10, 5): Audited(0.469, 1.000),
    Kind("kip", "class-stats", 1, 10, 10): Audited(0.207, 1.000),
    Kind("kip-negatives", "class-stats", 1, 1, 10): Audited(0.027, 0.872),
}


def audited(virtual: VirtualData, real_labels: Tensor) -> Audited | None:
    """What attacks found in virtual data of this kind; None if it was not audited.

    Neither features nor images under differential privacy were. Otherwise the next worse kind
    counts: more virtual images of a class, of fewer real ones, that start as real images.
    """
    if are_vectors(virtual.images.shape):
        return None
    per_class = len(virtual) // len(torch.unique(virtual.labels))
    smallest = int(torch.unique(real_labels, return_counts=True)[1].min())
    worse = [
        kind
        for kind in MEASURED
        if (kind.distiller, kind.formation) == (virtual.method, virtual.formation)
        and kind.start in (virtual.init, "real")
        and kind.per_class >= per_class
        and kind.real <= smallest
    ]
    nearest = min(
        worse, key=lambda kind: (kind.per_class, -kind.real, kind.start == "real"), default=None
    )
    return None if nearest is None else MEASURED[nearest]
