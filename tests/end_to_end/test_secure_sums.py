"""A run whose server sees sums alone learns what a plain run learns, by the real ClientApp."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process

NODES = 6
QUICK = {
    "partition.scheme": "iid",
    "num-rounds": 2,
    "train.local-epochs": 1,
    "train.batch-size": 128,
    "hfldd.auxiliary-size": 10,
    "hfldd.distiller": "dm",
    "hfldd.distill-steps": 1,
    "hfldd.distilled-size": 2,
    "hfldd.groups": 2,
}

FEDLGD = {
    "fedlgd.per-class": 1,
    "fedlgd.first-steps": 1,
    "fedlgd.refine-steps": 1,
    "fedlgd.global-per-class": 1,
    "fedlgd.global-steps": 2,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedavg"},
        {"strategy": "fedprox", "train.proximal-mu": 0.1},
        {"strategy": "hfldd", "model": "resnet8"},
        {"strategy": "fedlgd", **FEDLGD},
    ],
    ids=lambda settings: settings["strategy"],
)
def test_a_run_with_secure_sums_learns_what_a_plain_run_learns(
    settings, tmp_path, monkeypatch, without_pictures
):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # Flower does it for each record
    models, losses = [], []
    for secure in (False, True):
        folder = tmp_path / str(secure)
        config = {**QUICK, **settings, "secure-sums": secure}
        rows = run_in_process(config, [{"num-partitions": NODES}] * NODES, folder)
        assert [row["set_aside"] for row in rows] == [0] * len(rows)
        models.append(load_file(folder / "1" / "model.safetensors"))
        losses.append([row["loss"] for row in rows])
    plain, summed = models
    for name, array in plain.items():
        np.testing.assert_allclose(summed[name], array, rtol=1e-5, atol=1e-6)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != losses[0][-1]
    journal = (tmp_path / "True" / "1" / "journal.jsonl").read_text().splitlines()
    phases = {line.get("phase") for line in map(json.loads, journal)}
    assert {"query.secure_keys", "query.secure_shares", "query.secure_unmask"} <= phases
