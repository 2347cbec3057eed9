"""Random real images in place of virtual ones, as a plug-in for ``hfldd.distiller``.

``hfldd.distiller = "benchmarks.real_images:random_real"``: what as many real images are worth. They
leave the node as they are, so this is for measurements on public data alone.
"""

from typing import Any

import torch
from torch import Tensor

from flwr_distill.distill import VirtualData
from flwr_distill.distill.starts import REAL, start


def random_real(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    per_class: int,
    generator: torch.Generator,
    **unused: Any,
) -> VirtualData:
    """Draw `per_class` real images of each class; see `distill.registry.Distiller`."""
    chosen, chosen_labels = start(REAL, images, labels, per_class, generator)
    return VirtualData(
        chosen, chosen_labels, "real", steps=0, seed=generator.initial_seed(), init=REAL
    )
