"""The quick accuracies: what is distilled and judged, and what is written."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import accuracy
from flwr_distill.cli.judge import LENET
from flwr_distill.distill.registry import _DISTILLERS
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples, load_dataset


@pytest.fixture
def digits(monkeypatch):
    """Three classes that lie in other rows, of the size of MNIST's, instead of MNIST."""
    generator = np.random.default_rng(0)

    def samples(n):
        labels = np.arange(n) % 3
        images = generator.integers(0, 100, (n, 1, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[0, 9 * label : 9 * label + 9] += 150
        return RawSamples(images, labels)

    spec = DataSpec("mnist", (1, 28, 28), 3, (0.3,), (0.3,), safe_changes=("scale",))
    data = Dataset(spec, samples(60), samples(90))
    monkeypatch.setattr(accuracy, "load_dataset", lambda name, root: data)
    return data


@pytest.fixture
def judged(monkeypatch):
    """Training sets that the judge, which takes a few steps only, was given."""
    seen = []
    score = accuracy.train_and_score

    def noted(judge, train, test, spec, *, seed):
        assert judge is LENET
        seen.append((train, len(test)))
        return score(replace(judge, steps=20), train, test, spec, seed=seed)

    monkeypatch.setattr(accuracy, "train_and_score", noted)
    return seen


def test_quick_writes_accuracies_of_as_many_images_as_were_asked_for(
    digits, judged, monkeypatch, tmp_path
):
    distilled = []

    def distil(images, labels, *, num_classes, per_class, generator, formation, **rest):
        distilled.append((len(images), labels.unique().tolist()))
        return accuracy.VirtualData(
            images=torch.cat([images[labels == c][:per_class] for c in labels.unique()]),
            labels=labels.unique().repeat_interleave(per_class),
            method="test", steps=1, seed=0, init="noise", formation=formation or 2,
        )  # fmt: skip

    monkeypatch.setitem(_DISTILLERS, "dm", distil)
    pools = {
        "mnist10_all": ("all", 10),
        "mnist10_single": ("1", 10),
        "random_real": (None, 15),
        "ten_real": (None, 10),
    }
    monkeypatch.setattr(accuracy, "POOLS", pools)
    file = tmp_path / "accuracy.json"
    monkeypatch.setattr(sys, "argv", ["accuracy", "--quick", "--json", str(file)])
    accuracy.main()
    results = json.loads(file.read_text())
    assert list(results) == [
        "mnist10_all_lenet", "mnist10_single_lenet", "random_real_lenet", "ten_real_lenet"
    ]  # fmt: skip
    assert all(0 <= value <= 1 for value in results.values())
    assert results["random_real_lenet"] > 0.5
    assert distilled == [(60, [0, 1, 2]), (20, [0]), (20, [1]), (20, [2])]
    seen = [(tested, train.labels.bincount().tolist()) for train, tested in judged]
    each = [[40] * 3, [40] * 3, [15] * 3, [10] * 3]  # 10 images hold 40
    assert seen == [(90, counts) for counts in each]


def test_as_many_steps_are_done_as_fit_into_the_seconds(monkeypatch):
    clock = [3.0]
    monkeypatch.setattr(accuracy.time, "process_time", lambda: clock[0])

    def distil(steps, progress):
        clock[0] += 5.0  # what is prepared
        for step in range(1, steps + 1):
            clock[0] += 0.5
            progress(step, steps, 0.0)

    assert accuracy.steps_within(25.0, distil) == 40
    assert clock[0] < 3.0 + 5.0 + 11 * 0.5
    assert accuracy.steps_within(1.0, distil) == 1


def test_rows_hold_what_was_asked_for(monkeypatch, tmp_path):
    digits, file = load_dataset("digits"), tmp_path / "rows.json"
    monkeypatch.setattr(accuracy, "load_dataset", lambda name, root: digits)
    monkeypatch.setattr(accuracy, "train_and_score", lambda judge, *rest, **seed: 0.5)
    methods = ["kip", "kip-negatives"]
    arguments = [
        "--methods",
        *methods,
        "--per-class",
        "1",
        "--seconds",
        "0.01",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments])
    accuracy.main()
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == 2 * methods
    assert [row["classes"] for row in rows] == ["all", "all", "1", "1"]
    assert {row["steps"] for row in rows} <= set(range(1, 50))
    assert all(row["accuracy"] == {"quick": 0.5} for row in rows)
