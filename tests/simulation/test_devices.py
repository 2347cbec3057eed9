"""Virtual nodes take the GPUs of a machine in turn, and say when they differ in nothing else."""

import pytest
import torch

from flwr_distill.simulation.run import on_devices


@pytest.mark.parametrize(
    ("gpus", "device", "devices"),
    [
        (0, "auto", ["auto"]),
        (2, "auto", ["cuda:0", "cuda:1"]),
        (2, "cuda", ["cuda:0", "cuda:1"]),
        (2, "cuda:1", ["cuda:1"]),
        (2, "cpu", ["cpu"]),
    ],
)
def test_nodes_that_are_alike_name_the_number_of_devices_that_they_share(
    gpus, device, devices, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    nodes = on_devices([{"num-partitions": 3}] * 3, device)
    assert [node["device"] for node in nodes] == (devices * 3)[:3]
    assert {node["simulated"] for node in nodes} == {len(devices)}
    own = on_devices([{"data": "a"}, {"data": "b"}], device)
    assert [node["device"] for node in own] == (devices * 2)[:2]
    assert not any("simulated" in node for node in own)
