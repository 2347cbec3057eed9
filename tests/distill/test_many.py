"""Several nodes' data distilled in one call give what each gives by itself."""

import pytest
import torch
from torch import Tensor

from flwr_distill.distill import distiller
from flwr_distill.distill.many import distill_many


def node(seed: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % classes
    return torch.randn(size, 1, 8, 8, generator=generator) + labels[:, None, None, None], labels


SETS = [node(0, 3, 30), node(1, 1, 30), node(2, 3, 30), node(3, 3, 12), node(4, 1, 300)]


@pytest.mark.parametrize("name", ["kip", "kip-negatives", "dm", "auto"])
def test_many_nodes_at_once_get_what_each_would_alone(name: str) -> None:
    asked = {"num_classes": 4, "per_class": 2, "steps": 4}
    together = distill_many(
        name, SETS, generators=[torch.Generator().manual_seed(i) for i in range(5)], **asked
    )
    for i, (images, labels) in enumerate(SETS):
        alone = distiller(name)(images, labels, generator=torch.Generator().manual_seed(i), **asked)
        assert (together[i].method, together[i].seed) == (alone.method, i)
        torch.testing.assert_close(together[i].images, alone.images, rtol=1e-3, atol=1e-3)
        assert torch.equal(together[i].labels, alone.labels)


def test_nodes_of_one_size_share_the_steps() -> None:
    steps: list[int] = []
    distill_many(
        "kip",
        SETS[:3],
        generators=[torch.Generator().manual_seed(i) for i in range(3)],
        num_classes=4,
        per_class=2,
        steps=3,
        progress=lambda step, total, loss: steps.append(step),
    )
    assert steps == [1, 2, 3] * 2  # the two nodes of three classes together, and the other
