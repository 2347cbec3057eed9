"""Federated learning on data that differ: distillation strategies on Flower.

In a checkout and in an app bundle the folders of this package stand beside this one, in the wheel
below it. They are imported as `flwr_distill.client` in all three.
"""

from pathlib import Path

ROOMS = (
    *("cli", "fleet", "flower", "node", "client", "server", "strategies", "links", "protocol"),
    *("simulation", "storage", "distill", "task", "base"),
)
"""Folders of this package."""

_own = Path(__file__).parent
if not (_own / ROOMS[0]).is_dir():
    __path__.append(str(_own.parent))
