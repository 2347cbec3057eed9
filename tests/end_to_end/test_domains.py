"""One run over nodes that hold different data sets, in this process."""

import json

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_distill.client.app import app
from flwr_distill.server.app import main
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples


def squares(root, download):
    """Two classes in colour: a bright square to the left, or to the right."""
    images = np.zeros((60, 3, 12, 10), np.uint8)
    labels = np.arange(60) % 2
    for image, label in zip(images, labels, strict=True):
        image[:, 3:9, 5 * label : 5 * label + 5] = 220
    samples = RawSamples(images, labels)
    return Dataset(DataSpec("squares", (3, 12, 10), 2, (0.5,) * 3, (0.5,) * 3), samples, samples)


@pytest.mark.parametrize("strategy", ["fedavg", "fedlgd"])
def test_each_node_is_evaluated_on_its_own_test_samples_and_all_count_the_same(
    memory_grid, tmp_path, monkeypatch, strategy
):
    monkeypatch.setattr("flwr_distill.task.datasets.registry.import_object", lambda name: squares)
    run_config = {
        "strategy": strategy,
        "dataset": "private",
        "private.shape": "3x8x8",
        "num-rounds": 2,
        "fraction-evaluate": 1.0,
        "train.local-epochs": 1,
        "runs-dir": str(tmp_path),
        **{"fedlgd.first-steps": 2, "fedlgd.refine-steps": 2, "fedlgd.global-steps": 2},
    }

    def node(place, dataset):
        told = {"partition-id": place, "dataset": dataset, "state-dir": str(tmp_path / "state")}
        context = Context(3, place + 1, told, RecordDict(), run_config)
        return lambda message: app(message, context).content

    grid = memory_grid({1: node(0, "digits"), 2: node(1, "mine:squares")})
    main(grid, Context(3, 1, {}, RecordDict(), run_config))
    folder = tmp_path / "3"
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        (phase,) = (
            e for e in journal if e.get("phase") == "evaluate" and e["round"] == row["round"]
        )
        assert sorted(n["num-examples"] for n in phase["nodes"].values()) == [60, 360]
        accuracies = [n["eval-accuracy"] for n in phase["nodes"].values()]
        assert row["node_accuracy"] == pytest.approx(np.mean(accuracies))
        assert row["accuracy"] is None
    assert [row["node_accuracy"] is None for row in rows] == [True, False, False]
    nodes = json.loads((folder / "about.json").read_text())["nodes"].values()
    assert [told["name"] for told in nodes] == ["digits/0", "mine:squares/1"]
