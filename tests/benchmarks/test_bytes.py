"""Accuracy against bytes: each set is judged as it arrives, and costs what it says."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import bytes as by_bytes
from benchmarks import sizes
from flwr_distill.distill import kip
from flwr_distill.task.datasets import load_dataset


def test_each_set_has_its_bytes_and_a_stopped_run_goes_on(monkeypatch, tmp_path):
    digits = load_dataset("digits")
    monkeypatch.setattr(by_bytes, "load_dataset", lambda name, root: digits)
    monkeypatch.setattr(by_bytes, "METHODS", ("kip",))
    monkeypatch.setattr(kip, "STEPS", 2)
    monkeypatch.setattr(by_bytes, "PER_CLASS", (1, 3))
    monkeypatch.setattr(by_bytes, "QUICK", replace(by_bytes.QUICK, bits=(8, 4, 3, 2)))
    sizes_judged = []

    def score(judge, samples, test, spec, *, seed):
        sizes_judged.append(len(samples))
        if len(sizes_judged) == 7:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(by_bytes, "train_and_score", score)
    file, plot = tmp_path / "rows.json", tmp_path / "curve.svg"
    arguments = ["--quick", "--data-root", ".", "--json", str(file), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["bytes", *arguments])
    with pytest.raises(KeyboardInterrupt):
        by_bytes.main()
    assert len(json.loads(file.read_text())) == 6
    by_bytes.main()
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["kip"] * 8 + ["real"] * 2
    assert sizes_judged == [10] * 4 + [30] * 6 + [90]
    of_bits = [row["bytes"] for row in rows[4:8]]
    assert of_bits == sorted(of_bits, reverse=True)
    assert of_bits[0] < 30 * 64 + 1000
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("power", [1.5, 2.0])
def test_the_exponent_is_that_of_the_side(power):
    rows = [{"side": side, "seconds": 3 * side**power} for side in (28, 64, 224)]
    assert sizes.exponent(rows, "seconds") == pytest.approx(power)


def test_a_size_is_measured_with_card_and_packing():
    row = sizes.measured(8, 20, 1, steps=2)
    assert row["seconds"] > 0
    assert row["memory"] >= row["memory_distilling"] > row["real_images"] == 10 * 20 * 3 * 64 * 4
