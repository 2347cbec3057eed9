"""The audit's numbers, on digits and with few steps; one that was stopped continues."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import audit
from flwr_distill.distill.audit import Setting
from flwr_distill.distill.membership import least_epsilon
from flwr_distill.distill.private_matching import noise_for


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(audit, "GRID", [Setting("dm", "class-stats", 1, steps=1)])
    monkeypatch.setattr(audit, "CANARY_SETTINGS", [(1.0, "full", 10)])
    monkeypatch.setattr(audit, "virtual_accuracy", lambda data, epsilon: epsilon / 10)


def run(monkeypatch, folder):
    numbers = ["--sets", "8", "--classes", "2", "--canaries", "3", "--trials", "50"]
    files = [
        "--out",
        str(folder),
        "--json",
        str(folder / "a.json"),
        "--plot",
        str(folder / "a.svg"),
        "--page",
        str(folder / "a.html"),
    ]
    monkeypatch.setattr(sys, "argv", ["audit", *numbers, *files])
    audit.main()
    return json.loads((folder / "a.json").read_text())


def test_a_stopped_audit_goes_on_with_what_is_there(small, monkeypatch, tmp_path):
    first = run(monkeypatch, tmp_path)
    (row,) = first["rows"]
    assert (row["distiller"], row["start"], row["per_class"]) == ("dm", "class-stats", 1)
    assert row["shadows"] == 7
    assert row["auc_interval"][0] <= row["auc"] <= row["auc_interval"][1]
    assert set(row["worst"]) == {"mislabelled", "strange", "duplicated"}
    nearer = row["nearer_to_own"]
    assert nearer["pixels"][1] <= nearer["pixels"][0] <= nearer["pixels"][2]
    assert 0.3 < nearer["by_chance"] < 0.7
    assert [line["epsilon"] for line in first["dp"]] == [1, 10]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    shown = (tmp_path / "a.html").read_text()
    assert "digits, 2 classes, 7 shadows" in shown
    assert "<svg" in shown
    assert f"{row['auc']:.3f} (" in shown
    assert f"{nearer['features'][0]:.3f} (" in shown
    monkeypatch.setattr(audit, "distilled_halves", None)
    assert run(monkeypatch, tmp_path) == first


def test_a_file_of_a_version_that_measured_less_is_measured_again(small, monkeypatch, tmp_path):
    first = run(monkeypatch, tmp_path)
    (file,) = tmp_path.glob("*.npz")
    with np.load(file) as saved:
        less = {name: saved[name] for name in ("members", "kinds")}
    np.savez(file, **less)
    assert run(monkeypatch, tmp_path) == first


def test_one_setting_can_be_audited_alone(small, monkeypatch, tmp_path):
    many = [Setting("dm", start, 1, steps=1) for start in ("noise", "class-stats")]
    monkeypatch.setattr(audit, "GRID", many)
    numbers = ["--sets", "8", "--classes", "2", "--canaries", "3", "--trials", "50"]
    file = tmp_path / "a.json"
    files = ["--out", str(tmp_path), "--json", str(file), "--only", "dm-noise-1-f1-1"]
    monkeypatch.setattr(sys, "argv", ["audit", *numbers, *files])
    audit.main()
    assert [row["start"] for row in json.loads(file.read_text())["rows"]] == ["noise"]


def test_refreshed_data_of_a_node_with_one_small_class_are_attacked_too(
    small, monkeypatch, tmp_path
):
    again = Setting("dm", "class-stats", 1, steps=1, refreshes=1)
    monkeypatch.setattr(audit, "GRID", [again, Setting("dm", "class-stats", 10, steps=1)])
    numbers = ["--sets", "8", "--classes", "1", "--most", "24", "--canaries", "3", "--trials", "50"]
    files = ["--out", str(tmp_path), "--json", str(tmp_path / "a.json"), "--budgets", "1"]
    monkeypatch.setattr(sys, "argv", ["audit", *numbers, *files])
    audit.main()
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert row["refreshes"] == 1
    assert set(row["worst"]) == {"mislabelled", "strange", "duplicated"}
    (file,) = tmp_path.glob("*.npz")
    with np.load(file) as saved:
        assert saved["members"].shape == (8, 24)


def test_the_attack_on_a_release_is_as_strong_as_theory_has_it(monkeypatch):
    """The image's features have norm root 20 of all networks; the noise is for that."""
    generator = torch.Generator().manual_seed(0)
    inside, outside = audit.release_scores(4.0, "full", 10, 4000, generator)
    apart = (inside.mean() - outside.mean()) / outside.std()
    assert apart == pytest.approx(1 / noise_for(4.0, audit.DELTA), rel=0.06)
    assert 0.5 < least_epsilon(inside, outside, audit.DELTA) < 4


def test_too_little_noise_is_found_out(monkeypatch):
    monkeypatch.setattr(audit, "noise_for", lambda epsilon, delta: 0.3)
    inside, outside = audit.release_scores(1.0, "full", 10, 2000, torch.Generator().manual_seed(0))
    assert least_epsilon(inside, outside, audit.DELTA) > 1
