"""Federations on a GPU, server and nodes, give what they give on the CPU."""

import pytest
import torch

from flwr_distill.protocol.registry import all_methods
from tests.gpu import work
from tests.gpu.work import ACCURACY, GPU
from tests.matrix import strategies

LITTLE = {
    "dp-fixed__noise_multiplier": 0.0,
    "dp-adaptive__noise_multiplier": 0.0,
    "dp-adaptive__clipped_count_stddev": 0.0,
    "hfldd__distiller": "dm",
    "hfldd__distill_steps": 2,
    "hfldd__distilled_size": 4,
    "hfldd__auxiliary_size": 20,
    "hfldd__initial_steps": 2,
    "fedhead__distill_epochs": 2,
    "fedhead__server_epochs": 2,
    "fedhead__reference_size": 16,
    "fedhkd__noise": 0.0,
    "fedaf__distill_steps": 2,
    "feddm__distill_steps": 2,
    "fedmd__auxiliary_size": 16,
    "fedmd__pretrain_epochs": 1,
    "fedmd__private_epochs": 1,
    "fedlgd__first_steps": 2,
    "fedlgd__refine_steps": 2,
    "fedlgd__global_steps": 2,
    "fedlgd__global_per_class": 1,
    "fedlgd__per_class": 1,
    "fedlgd__every": 2,
}


@pytest.mark.parametrize(
    "strategy", strategies(all_methods().keys() - {"bulyan"})
)  # it needs three
def test_every_strategy_gives_what_it_gives_on_the_cpu(gpus, federation, strategy):
    settings = {"strategy": strategy, "fraction_evaluate": 1.0, **LITTLE}
    assert federation(GPU, **settings) == federation("cpu", **settings)
    assert gpus.used == {torch.device(GPU)}


LEARNING = {
    "fedavg": {},
    "hfldd": {"hfldd__distiller": "kip"},
    "fedlgd": {
        "fedlgd__first_steps": 50,
        "fedlgd__global_steps": 10,
        "fedlgd__per_class": 10,
        "fedlgd__contrast": 0.1,
        "train__local_epochs": 10,
        "train__lr": 0.02,
    },
    "fedhead-plus": {},
    "analytic": {},
}
"""Settings with which a few rounds learn something."""


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", LEARNING)
def test_a_real_gpu_reaches_the_accuracy_of_the_cpu(federation, strategy):
    rounds = {"num_rounds": 3, "train__local_epochs": 3, "phase_timeout": 60.0}
    nodes = {"partitions": 4, "partition__scheme": "iid"}
    settings = {**LITTLE, **rounds, **nodes, **LEARNING[strategy], "strategy": strategy}
    on_gpu, on_cpu = (federation(device, **settings)[-1] for device in (work.REAL_GPU, "cpu"))
    assert on_cpu[0] > 0.6
    assert on_gpu[0] == pytest.approx(on_cpu[0], abs=ACCURACY)


@pytest.mark.parametrize(
    "strategy",
    [
        "fedavg",
        "fedlgd",
        "hfldd",
        "fedhead",
    ],
)
def test_samples_that_do_not_fit_on_the_gpu_stay_in_main_memory_and_give_the_same(
    gpus, federation, monkeypatch, strategy
):
    settings = {"strategy": strategy, "num_rounds": 1, **LITTLE}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    assert federation(GPU, **settings) == federation("cpu", **settings)


@pytest.mark.parametrize(
    ("strategy", "works"),
    [
        ("fedavg", "task/evaluation.py"),
        ("feddf", "distill/ensemble.py"),
        ("fedhead-plus", "distill/ensemble.py"),
        ("fedlgd", "distill/gradient_matching.py"),
    ],
)
def test_the_server_works_on_its_own_device_whatever_the_nodes(gpus, federation, strategy, works):
    with gpus.measured() as used:
        federation("cpu", server_device=GPU, strategy=strategy, **LITTLE)
    files = {line.split(":")[0] for line, _ in used.lines("launch")}
    assert {"task/evaluation.py", works} <= files
    assert gpus.used == {torch.device(GPU)}


def test_a_model_with_batch_normalisation_is_evaluated_in_each_round(gpus, federation):
    settings = {"strategy": "fedavg", "model": "resnet8", "num_rounds": 3, "train__batch_size": 32}
    assert len(federation(GPU, **settings)) == 4
    assert gpus.used == {torch.device(GPU)}
