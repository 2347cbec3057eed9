"""`flwr-distill partition`: the table, the picture, and what is refused."""

import json
import re

import numpy as np
import pytest

from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import partition_samples

from .commands import assert_refused, command


def partition(*arguments):
    return command("partition", *arguments)


def rows(output):
    """Cells of the table's rows, by their first cell."""
    lines = [re.split("│", line)[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [int(cell.strip() or 0) for cell in cells[1:]] for cells in lines}


def test_the_table_tells_what_nodes_of_a_run_with_these_settings_hold():
    result = partition("cluster-uc", "--nodes", 12, "--seed", 3)
    assert result.exit_code == 0
    table = rows(result.output)
    settings = TaskSettings.from_run_config({"partition.scheme": "cluster-uc", "seed": 3})
    expected = {
        str(node): np.bincount(partition_samples(settings, node, 12).labels, minlength=10).tolist()
        for node in range(12)
    }
    total = np.sum(list(expected.values()), axis=0).tolist()
    assert table == {name: [*held, sum(held)] for name, held in {**expected, "all": total}.items()}


def test_samples_beyond_a_limit_and_reserved_ones_are_nobodys():
    options = ["--nodes", 3, "--max-of-a-class", 20, "--reserved", 50]
    *held, samples = rows(partition("iid", *options).output)["all"]
    assert (max(held) <= 20, samples) == (True, 150)


def test_an_index_file_is_shown_and_drawn(tmp_path):
    labels = load_dataset("digits").train.labels
    ones, twos = (np.flatnonzero(labels == c)[:5].tolist() for c in (1, 2))
    (tmp_path / "split.json").write_text(json.dumps({"0": ones, "1": twos}))
    picture = tmp_path / "picture.png"
    result = partition(
        "index-file", "--index-file", tmp_path / "split.json", "--nodes", 2, "--plot", picture
    )
    assert rows(result.output)["0"] == [0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 5]
    assert rows(result.output)["1"] == [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 5]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["clustr"], "partition.scheme = 'clustr'"),
        (["cluster-mc", "--clusters", "3:x"], "partition.clusters = '3:x'"),
        (["cluster-bc", "--nodes", "3"], "6:1:1:1:1"),
        (["pareto", "--alpha", "0"], "partition.alpha = 0.0"),
        (["index-file"], "partition.index-file = '': must name a file"),
        (["--dataset", "dgits"], "dgits"),
        (["--dataset", "private"], "private"),
        (["--plot", "picture.foo"], "'foo' is not supported"),
    ],
)
def test_what_cannot_be_split_or_drawn_is_refused_in_a_line(arguments, reason):
    assert_refused(partition(*arguments), reason)
