"""A run whose server sees sums alone learns what a plain run learns, by the real ClientApp."""

import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.outbox import FOLDER, entries

from .runs import ROOT, journal, phases

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
        pytest.param({"strategy": "fedprox", "train.proximal-mu": 0.1}, marks=pytest.mark.matrix),
        pytest.param(
            {"strategy": "hfldd", "model": "resnet8", "hfldd.complete-clusters": False},
            marks=pytest.mark.matrix,
        ),
        {"strategy": "hfldd", "hfldd.heads": "all"},
        {"strategy": "fedlgd", **FEDLGD},
        {"strategy": "analytic", "model": "random-features"},
    ],
    ids=lambda settings: settings["strategy"],
)
def test_a_run_with_secure_sums_learns_what_a_plain_run_learns(settings, tmp_path, monkeypatch):
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
    for name, array in plain.items():  # training makes what rounding changes larger
        np.testing.assert_allclose(summed[name], array, rtol=1e-5, atol=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != losses[0][-1]
    for step in ("keys", "shares", "unmask"):
        assert phases(tmp_path / "True" / "1", f"query.secure_{step}")


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"strategy": "fedavg"},
            marks=pytest.mark.deployment("secure sums, a node killed in one"),
        ),
        {"strategy": "fedlgd", **FEDLGD},
    ],
    ids=lambda settings: settings["strategy"],
)
def test_a_node_that_is_killed_in_a_sum_costs_the_round_nothing(settings, tmp_path):
    """Real processes: it dies in the second round, as it shares its secrets or just after that."""
    federation, runs = LocalFederation(5, tmp_path / "federation"), tmp_path / "runs"
    try:
        federation.start(timeout=600)
        lost = federation.nodes[3]

        def kill():
            def shared():
                types = [line["type"] for line in entries(lost.state_dir / FOLDER)]
                return types.count("query.secure_shares")

            while shared() < 2:
                time.sleep(0.02)
            lost.kill()

        threading.Thread(target=kill, daemon=True).start()
        config = {
            **{"num-rounds": 3, "min-nodes": 5, "phase-timeout": 60.0, "quorum": 0.5},
            **{"train.local-epochs": 1, "secure-sums": True, "runs-dir": str(runs), **settings},
        }
        run = federation.run(ROOT, config, timeout=900)
    finally:
        federation.stop()
    assert run.completed, "\n".join(run.lines)
    folder = runs / str(run.run_id)
    entries_of = [entry for entry in journal(folder) if entry.get("phase", "").startswith("train")]
    trained = {entry["round"]: len(entry["nodes"]) for entry in entries_of}
    published = {p["round"]: len(p["nodes"]) for p in phases(folder, "query.secure_keys")}
    assert (trained[1], published[2], trained[2]) == (5, 5, 4)
    assert trained[3] >= 4
    assert "Secure sums continue without" not in "\n".join(run.lines)
