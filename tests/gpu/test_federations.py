"""Federations on the second of two GPUs, server and nodes, give what they give on the CPU."""

import pytest

from protocol.registry import built_in_methods
from tests.gpu.work import GPU

LITTLE = {
    "hfldd__distiller": "dm",
    "hfldd__distill_steps": 2,
    "hfldd__distilled_size": 4,
    "hfldd__auxiliary_size": 20,
    "hfldd__initial_steps": 2,
    "fedhead__distill_epochs": 2,
    "fedhead__server_epochs": 2,
    "fedhead__reference_size": 16,
    "fedlgd__first_steps": 2,
    "fedlgd__refine_steps": 2,
    "fedlgd__global_steps": 2,
    "fedlgd__global_per_class": 1,
    "fedlgd__per_class": 1,
    "fedlgd__every": 2,
}


@pytest.mark.parametrize("strategy", sorted(built_in_methods()))
def test_every_strategy_gives_what_it_gives_on_the_cpu(gpus, federation, strategy):
    settings = {"strategy": strategy, "fraction_evaluate": 1.0, **LITTLE}
    assert federation(GPU, **settings) == federation("cpu", **settings)


def test_a_model_with_batch_normalisation_is_evaluated_in_each_round(gpus, federation):
    settings = {"strategy": "fedavg", "model": "resnet8", "num_rounds": 3, "train__batch_size": 64}
    assert len(federation(GPU, **settings)) == 4
