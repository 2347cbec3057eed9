"""Nodes that train together on one GPU."""

import pytest

from flwr_distill.client.local_data import GPU_FACTOR, LocalData
from flwr_distill.client.training_together import train_together, why_one_by_one
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.gpu.work import GPU, SGD, SPEC, generator, samples


def trained(device, nodes=3, steps=2, changes=(), **settings):
    model = create_model("digits-cnn", SPEC, seed=0).to(device)
    asked = TrainSettings(local_epochs=1, batch_size=8, **settings)
    data = samples(8 * steps).to(device)
    sets = [data.subset(range(8 * steps - 3 * (node % 2))) for node in range(nodes)]
    assert not why_one_by_one(model, sets[0], asked)
    return train_together(model, sets, asked, [generator(node) for node in range(nodes)], changes)


@pytest.mark.parametrize("changes", [(), CHANGES], ids=["plain", "changed"])
def test_nodes_get_on_a_gpu_what_they_get_on_the_cpu(gpu, changes):
    start = create_model("digits-cnn", SPEC, seed=0).state_dict()
    found, wanted = trained(gpu.device, changes=changes), trained("cpu", changes=changes)
    for (weights, measures), (expected, numbers) in zip(found, wanted, strict=True):
        gpu.check(measures, numbers, SGD)
        gpu.check(weights, expected, SGD, start)


@pytest.mark.parametrize(("changes", "launches"), [((), 80), (CHANGES, 180)])
def test_a_step_of_many_nodes_waits_for_nothing_and_launches_no_more_with_more_of_them(
    step, changes, launches
):
    few = step(lambda steps: trained(GPU, nodes=2, steps=steps, changes=changes))
    many = step(lambda steps: trained(GPU, nodes=8, steps=steps, changes=changes))
    assert (few.waits, many.waits) == (0, 0), many.where
    assert (few.copies, many.copies) == (0, 0), many.where
    assert many.launches == few.launches <= launches, many.where


def test_a_process_keeps_more_samples_on_a_gpu_than_in_main_memory(gpu):
    data = samples(16 * GPU_FACTOR)
    own, on_gpu = (LocalData(SPEC, s, s, b"") for s in (data, data.to(gpu.device)))
    assert own.size == 2 * (data.inputs.nbytes + data.labels.nbytes) == GPU_FACTOR * on_gpu.size
