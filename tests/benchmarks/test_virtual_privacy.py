"""The attack on virtual images finds members whose copies are sent; a stopped run goes on."""

import sys

import numpy as np
import pytest
import torch

from benchmarks import virtual_privacy
from distill import VirtualData
from distill.membership import auc
from task.datasets import Dataset, DataSpec, RawSamples

SPEC = DataSpec("mnist", (1, 28, 28), 3, (0.5,), (0.25,), safe_changes=("scale",))
SHADOWS, TARGETS = 6, 2


@pytest.fixture
def distilled(monkeypatch):
    """Instead of distilling: near copies of a node's own images, of noise; who was distilled."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 1, 28, 28), dtype=np.uint8)
    data = RawSamples(pixels, np.arange(90) % 3)
    monkeypatch.setattr(
        virtual_privacy, "load_dataset", lambda name, root: Dataset(SPEC, data, data)
    )
    few = {"CLASSES": (0, 2), "IMAGES_A_CLASS": 20, "JUDGE_STEPS": 2, "RESAMPLES": 20}
    for name, value in few.items():
        monkeypatch.setattr(virtual_privacy, name, value)
    seen = []

    def copies(images, labels, *, num_classes, per_class, formation, generator):
        seen.append((labels.unique().tolist(), generator.initial_seed()))
        order = torch.arange(per_class) % len(images)
        made = images[order] + 0.1 * torch.randn(per_class, 1, 28, 28, generator=generator)
        return VirtualData(made, labels[order], "copies", steps=0, seed=0, init="real")

    monkeypatch.setattr(virtual_privacy, "distill_dm", copies)
    return seen


def run(monkeypatch, out):
    arguments = ["--data-root", ".", "--out", str(out)]
    arguments += ["--shadows", str(SHADOWS), "--targets", str(TARGETS)]
    monkeypatch.setattr(sys, "argv", ["virtual_privacy", *arguments])
    virtual_privacy.main()


def test_copies_are_found_and_no_model_is_made_twice(distilled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(virtual_privacy, "VARIANTS", {"copies": (20, 8)})
    monkeypatch.setenv("COLUMNS", "200")
    run(monkeypatch, tmp_path)
    models = SHADOWS + TARGETS
    assert [held for held, _ in distilled] == [[0], [2]] * models
    assert len({seed for _, seed in distilled}) == 2 * models
    first = capsys.readouterr().out
    (tmp_path / "copies-3.npz").unlink()
    run(monkeypatch, tmp_path)
    assert len(distilled) == 2 * models + 2
    assert capsys.readouterr().out == first
    assert "1.000 (1.000 to 1.000)" in first  # by the nearest image
    assert "1.000 +- 0.000" in first  # of virtual images are nearer to an own one


def test_the_interval_holds_the_value_and_what_is_known_has_none(monkeypatch):
    monkeypatch.setattr(virtual_privacy, "RESAMPLES", 60)
    generator = np.random.default_rng(0)
    members = generator.random((3, 400)) < 0.5
    value, low, high = virtual_privacy.interval(auc, members, generator.random((3, 400)))
    assert low < value < high
    assert 0.02 < high - low < 0.12
    assert low < 0.5 < high
    assert virtual_privacy.interval(auc, members, members * 1.0).tolist() == [1, 1, 1]
