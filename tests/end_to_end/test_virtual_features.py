"""Whole runs in which members and server distil features of a frozen network, not images."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.record.checkpoint import (
    CheckpointError,
    checkpoints,
    load_checkpoint,
)
from flwr_distill.server.record.frozen import load_frozen, save_frozen
from flwr_distill.task.backbones.random_features import WIDTH
from flwr_distill.task.errors import SettingsError
from tests.errors import at

from .runs import read

NODES = 5
CONFIG = {
    "dataset": "digits",
    "model": "random-features",
    "num-rounds": 2,
    "partition.classes": 2,
    "train.lr": 1.0,
    "train.holdout": 0.0,
    "hfldd.auxiliary-size": 20,
    "hfldd.distilled-size": 10,
    "fedlgd.per-class": 4,
    "fedlgd.first-steps": 20,
    "fedlgd.refine-steps": 2,
    "fedlgd.every": 2,
    "fedlgd.global-per-class": 2,
    "fedlgd.global-steps": 2,
}
HEAD = 10 * (WIDTH + 1)


def play(folder, **settings):
    """Rows of a run, and its folder."""
    nodes = [{"num-partitions": NODES}] * NODES
    return run_in_process(CONFIG | settings, nodes, folder), folder / "1"


def parcels(folder):
    """The virtual data that heads keep."""
    files = (folder / "nodes").glob("runs/1/*/parcel-*")
    return [VirtualData.from_bytes(file.read_bytes()) for file in files]


def test_members_of_hfldd_send_features_and_heads_learn_from_them(tmp_path):
    rows, folder = play(tmp_path, strategy="hfldd", start="analytic", **{"train.holdout": 0.1})
    received = parcels(tmp_path)
    assert len(received) >= NODES - 1
    assert {virtual.images.shape for virtual in received} == {(10, WIDTH, 1, 1)}
    assert {virtual.method for virtual in received} == {"dm"}
    assert all(virtual.card is not None for virtual in received)
    most = 10 * WIDTH / 2 + 2500  # 4 bits a number, header and seal
    assert 0 < rows[-1]["link_bytes"] <= len(received) * most
    assert rows[-1]["accuracy"] > 0.9
    heads = load_file(folder / "model.safetensors")["head.weight"]
    start = as_arrays(load_checkpoint(checkpoints(folder)[0]).arrays)["head.weight"]
    assert not np.array_equal(heads, start)


def test_fedlgd_distils_features_on_nodes_and_server_without_a_picture(tmp_path):
    rows, folder = play(tmp_path, strategy="fedlgd")
    virtual = VirtualData.from_safetensors((folder / "virtual.safetensors").read_bytes())
    assert virtual.images.shape == (20, WIDTH, 1, 1)
    assert virtual.steps == 2  # gradients were matched
    assert not (folder / "virtual.png").exists()
    assert len(rows) == 3


def test_messages_and_checkpoints_have_the_head_and_the_model_file_has_all(tmp_path):
    rows, folder = play(tmp_path, strategy="fedavg")
    each_way = 4 * HEAD
    sent = rows[2]["server_bytes"] - rows[1]["server_bytes"]
    assert 2 * NODES * each_way < sent < 2 * NODES * (each_way + 5000)
    frozen, head = {"network.waves", "network.phases"}, {"head.weight", "head.bias"}
    assert load_file(folder / "model.safetensors").keys() == frozen | head
    assert load_file(folder / "frozen.safetensors").keys() == frozen  # once, for all checkpoints
    last = load_checkpoint(checkpoints(folder)[2])
    assert as_arrays(last.arrays).keys() == head
    formulas = read(folder, "traffic")["formulas"]
    assert formulas["fedavg (HFLDD, eq. 3)"] == NODES * HEAD * 3 * 4


def test_a_run_goes_on_only_with_the_network_that_it_began_with(tmp_path):
    play(tmp_path, strategy="fedavg", **{"num-rounds": 1})
    rows, _ = play(tmp_path, strategy="fedavg", resume="1")
    assert [row["round"] for row in rows] == [0, 1, 2]

    whole = load_frozen(tmp_path / "1")
    save_frozen(tmp_path / "1", {**whole, "network.waves": whole["network.waves"] + 1})
    with pytest.raises(SettingsError, match=r"frozen network had another network.waves"):
        play(tmp_path, strategy="fedavg", resume="1", **{"num-rounds": 3})


def test_a_frozen_part_that_was_changed_or_cut_is_named(tmp_path):
    save_frozen(tmp_path, {"weight": torch.ones(3)})
    assert torch.equal(load_frozen(tmp_path)["weight"], torch.ones(3))
    file = tmp_path / "frozen.safetensors"
    content = file.read_bytes()
    for spoiled in (content[:-1], content[:-1] + b"\0", b""):
        file.write_bytes(spoiled)
        with pytest.raises(CheckpointError, check=at(file)):
            load_frozen(tmp_path)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hfldd.network": "a:B", "hfldd.distiller": "dm"}, "hfldd.network = 'a:B'"),
        ({"hfldd.refresh-every": 2}, "hfldd.refresh-every = 2: .*set backbone.trains"),
        (
            {"hfldd.dp-epsilon": 1.0, "hfldd.start": "noise", "hfldd.distiller": "dm"},
            "hfldd.dp-epsilon = 1.0: .*no differential privacy",
        ),
        ({"hfldd.formation": 2}, r"hfldd.formation = 2: samples are of shape \(1024, 1, 1\)"),
    ],
)
def test_settings_that_need_virtual_images_are_refused_by_name(tmp_path, settings, text):
    with pytest.raises((SettingsError, ValueError), match=text):
        play(tmp_path, strategy="hfldd", **settings)
