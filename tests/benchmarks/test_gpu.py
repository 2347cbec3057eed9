"""The benchmark of GPUs can be tried without one, and says what it would need."""

import json
import sys

import pytest
import torch

from benchmarks import gpu
from distill.registry import _DISTILLERS

PIECES = ["distil-kip", "train-digits-cnn-16-float32"]
COUNTS = ["launches", "waits", "copies", "flop", "bytes"]


def test_it_measures_what_was_asked_for_beside_its_counts_and_floor(tmp_path, monkeypatch, capsys):
    file = tmp_path / "gpu.json"
    asked = ["--quick", "--device", "cpu", "--only", *PIECES, "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu", *asked])
    gpu.main()

    printed, report = capsys.readouterr().out, json.loads(file.read_text())
    assert list(report["rows"]) == PIECES
    assert report["machine"]["device"] == "cpu"
    assert report["machine"]["torch"] == torch.__version__
    assert {"driver", "cuda", "cores"} <= report["machine"].keys()
    for name, row in report["rows"].items():
        assert name in printed
        assert row["fastest"] <= row["milliseconds"] <= row["slowest"]
        assert all(isinstance(row[count], int) for count in COUNTS)
        seconds = (row["flop"] / 67e12, row["bytes"] / 3.35e12)
        assert row["floor_milliseconds"] == pytest.approx(1e3 * max(seconds))
        assert row["ratio"] == pytest.approx(row["milliseconds"] / row["floor_milliseconds"])
    training = report["rows"][PIECES[1]]
    assert 0 < training["launches"] <= 50
    assert training["waits"] == training["copies"] == 0


def test_without_a_gpu_it_says_so_and_names_the_way_to_try_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "no CUDA device is there" in error
    assert "--device cpu" in error


def test_every_distiller_is_measured():
    measured = {name.removeprefix("distil-") for name in gpu.WORK if name.startswith("distil-")}
    assert measured == {*_DISTILLERS, "ensemble"} - {"auto"}


def test_a_node_that_fails_fails_the_measurement_of_a_run(monkeypatch):
    def broken(message, context):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("benchmarks.in_process.client_app", broken)
    run = gpu.federation(gpu.Setting(torch.device("cpu"), quick=True), "fedavg")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(1)
