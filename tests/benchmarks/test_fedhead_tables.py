"""FedHEAD's tables: round trips are counted, and accuracies have an interval by bootstrap."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fedhead import WORDS, half_cifar10, short_sst_2
from benchmarks.papers import command as papers
from benchmarks.papers.bootstrap import half_interval
from benchmarks.papers.runs import run_row
from benchmarks.papers.tables import read_tables
from flwr_distill.task.datasets import load_dataset

TABLES = read_tables()
TINY = {"dataset": "digits", "model": "mlp", "min-nodes": 6, "num-rounds": 1}


def lines_of(name, method, tmp_path, **settings):
    """Lines of a tiny run of a method's first row."""
    table = TABLES[name]
    row = next(row for row in table.rows(small=True) if row.method == method)
    row = replace(row, ours={**row.ours, **TINY, **settings}, nodes=row.nodes[:6])
    row = replace(row, nodes=[{**node, "num-partitions": 6} for node in row.nodes])
    run_row(row, 0, row.folder(tmp_path, 0), "", lambda: None, 1)
    (line,) = papers.lines_of(table, [row], [0], tmp_path, "")
    return line


@pytest.mark.parametrize(
    ("method", "paper", "counted"),
    [("FedHEAD", "2 M T = 4", 4), ("FedHEAD+", "2 M T = 4", 4), ("FedDF", "N T = 6", 6)],
)
def test_round_trips_are_those_of_table_1(method, paper, counted, tmp_path):
    line = lines_of("fedhead-1", method, tmp_path)
    assert (line["paper"]["formula"], line["ours"]["formula"]["mean"]) == (paper, counted)


def test_the_papers_deviation_stands_beside_an_interval_by_bootstrap(tmp_path):
    few = {"train.local-epochs": 1, "partition.scheme": "iid", "partition.reserved": 0}
    line = lines_of("fedhead-2", "FedAvg", tmp_path, **few)
    assert line["paper"]["deviation"] == 0.04
    value = line["ours"]["value"]["mean"]
    assert line["ours"]["deviation"]["mean"] == half_interval(value, 360)


def test_halved_images_have_the_mean_of_each_block(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "cifar10").mkdir()
    images = rng.integers(0, 256, (4, 32, 32, 3), np.uint8)
    for part in ("train", "test"):
        np.savez(tmp_path / "cifar10" / f"{part}.npz", images=images, labels=np.arange(4))
    halved = half_cifar10(tmp_path, False)
    assert halved.spec.shape == (3, 16, 16)
    mean = images[2, 6:8, 10:12, 1].astype(float).mean()
    assert abs(halved.train.images[2, 1, 3, 5] - mean) <= 0.5


def test_shortened_texts_are_the_first_words(tmp_path):
    (tmp_path / "sst-2").mkdir()
    for part in ("train", "dev"):
        words = " ".join(f"word{place}" for place in range(WORDS + 5))
        (tmp_path / "sst-2" / f"{part}.tsv").write_text(f"sentence\tlabel\n{words}\t1\na film\t0\n")
    whole, short = load_dataset("sst-2", tmp_path), short_sst_2(tmp_path, False)
    for ours, theirs in ((short.train, whole.train), (short.test, whole.test)):
        assert [np.count_nonzero(text) for text in ours.images] == [WORDS, 2]
        np.testing.assert_array_equal(ours.images[..., :WORDS], theirs.images[..., :WORDS])
