"""What a run asks of its nodes' formation, and what a cluster head may claim of it."""

import math

import pytest

from flwr_distill.distill.formation import MAX_FORMATION
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.images import chosen_formation
from flwr_distill.strategies.fedlgd.strategy import FedLGD
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.limits import Limits
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from tests.errors import at


def limits(formation, shape, **rest):
    asked = Distillation(distilled_size=20, formation=formation, **rest)
    directory = Directory()
    directory.num_examples = dict.fromkeys((1, 2, 3), 100)
    return Limits(directory, asked, 10, shape)


@pytest.mark.parametrize(
    ("formation", "shape", "most"),
    [
        (1, (1, 28, 28), 1),
        (3, (1, 28, 28), 3),
        (0, (1, 28, 28), 2),
        (0, (1, 16, 16), 2),
        (0, (1, 8, 8), 1),
        (2, None, 2),
        (0, None, MAX_FORMATION),
    ],
)
def test_members_have_the_formation_that_was_asked_for_and_heads_count_their_tiles(
    formation, shape, most
):
    bounds = limits(formation, shape)
    assert bounds.parcels([2, 3], 1).formation == most
    samples = bounds.directory.samples([1, 2, 3])
    assert bounds.pool(1, [2, 3], samples) == 100 + 2 * 20 * most**2


def test_small_images_cost_neither_bytes_nor_values():
    one, packed = limits(1, (1, 28, 28)), limits(2, (1, 28, 28))
    assert one.num_bytes(2) == packed.num_bytes(2)
    assert one.num_values(2) == packed.num_values(2) == 20 * math.prod((1, 28, 28))


def test_raw_data_have_no_formation():
    assert limits(0, (1, 28, 28), share_raw_data=True).parcels([2], 1).formation == 1


def test_a_run_whose_images_have_no_room_ends_before_any_node_is_asked():
    spec = DataSpec("texts", (1, 1, 12), 4, (0.5,), (0.5,))
    with pytest.raises(SettingsError, check=at("hfldd.formation", value=2)):
        HFLDD(formation=2, image_shape=spec.shape)
    with pytest.raises(SettingsError, check=at("fedlgd.formation", value=2)):
        FedLGD(model=create_model("mlp", spec, seed=0), spec=spec, formation=2)
    assert chosen_formation("hfldd.formation", 0, spec.shape) == 1
