"""The audit's numbers, on digits and with few steps; one that was stopped goes on."""

import json
import sys

import pytest
import torch

from benchmarks import audit
from distill.audit import Setting
from distill.membership import least_epsilon
from distill.private_matching import noise_for


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
    assert [line["epsilon"] for line in first["dp"]] == [1, 10]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    monkeypatch.setattr(audit, "attack", None)
    assert run(monkeypatch, tmp_path) == first


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
