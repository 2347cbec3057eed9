"""Texts as TSV and tables as CSV: read as they are, refused with the line and the remedy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils import murmurhash3_32

from flwr_distill.task.datasets import DatasetError, load_dataset
from flwr_distill.task.datasets.text import LENGTH, VOCABULARY, token_ids
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import partition_samples
from tests.errors import at

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def identity(word):
    return 1 + murmurhash3_32(word, positive=True) % (VOCABULARY - 1)


def test_words_have_the_same_identity_everywhere_and_no_word_has_none():
    ids = token_ids(["A cat, a CAT!", "", "wörd " * 100])
    assert ids[0, 0, 0, :5].tolist() == [*map(identity, ["a", "cat", "a", "cat"]), 0]
    assert not ids[1].any()
    assert (ids[2] == identity("wörd")).all()
    assert ids.shape == (3, 1, 1, LENGTH)
    assert ids.min() >= 0
    assert ids.max() < VOCABULARY


def test_sst2_is_read_from_its_own_layout(tmp_path):
    write(tmp_path / "sst-2/train.tsv", "sentence\tlabel", 'a "fine" film\t1', "dull\t0")
    write(tmp_path / "sst-2/dev.tsv", "sentence\tlabel", "a film\t1")
    write(tmp_path / "sst-2/test.tsv", "index\tsentence", "0\tno label here")
    dataset = load_dataset("sst-2", tmp_path)
    assert dataset.train.labels.tolist() == [1, 0]
    assert dataset.test.labels.tolist() == [1]
    inputs = dataset.train.to_samples(dataset.spec).inputs
    assert inputs[0, 0, 0, :3].tolist() == [identity(word) for word in ("a", "fine", "film")]


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
def test_ag_news_is_read_whole():
    dataset = load_dataset("ag-news", SHARED)
    assert np.bincount(dataset.train.labels).tolist() == [1000] * 4
    assert np.bincount(dataset.test.labels).tolist() == [250] * 4
    words = (dataset.train.images > 0).sum(axis=(1, 2, 3))
    assert (words < LENGTH).mean() > 0.9
    part = partition_samples(TaskSettings(dataset="ag-news", data_root=str(SHARED)), 0, 2)
    assert part.images.dtype == np.float32


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
def test_sst2_and_unicaucas_flows_are_read_whole():
    texts = load_dataset("sst-2", SHARED)
    assert np.bincount(texts.train.labels).tolist() == [3000, 3000]
    assert len(texts.test) == 872
    flows = load_dataset("csv", SHARED / "unicauca")
    assert (flows.spec.shape, flows.spec.num_classes) == ((80, 1, 1), 15)
    assert (len(flows.train), len(flows.test)) == (5643, 1410)


@pytest.mark.parametrize(
    ("lines", "where", "need"),
    [
        (["label\ttext", "4\tout of range"], ", line 2", "2 fields and a label of 0 to 3"),
        (["label\ttext", "1\tfine", "1"], ", line 3", None),
        (["label\ttext", "one\tfine"], ", line 2", None),
        (["label\twords", "1\tfine"], "", "'label' and 'text'"),
        (["label\ttext"], "", "has no texts"),
    ],
)
def test_a_malformed_tsv_is_an_error_with_its_line(tmp_path, lines, where, need):
    write(tmp_path / "train.tsv", *lines)
    write(tmp_path / "test.tsv", "label\ttext", "0\tfine")
    with pytest.raises(DatasetError, match=need, check=at(f"{tmp_path / 'train.tsv'}{where}")):
        load_dataset("ag-news", tmp_path)


FLOWS = ("bytes, duration,Label", "100,0.5,web", "300,0.5,mail", "200,0.5,web")


def test_a_table_becomes_standardised_channels_and_numbered_classes(tmp_path):
    write(tmp_path / "csv/train.csv", *FLOWS)
    write(tmp_path / "csv/test.csv", FLOWS[0], "400,1.5,mail")
    dataset = load_dataset("csv", tmp_path)
    assert (dataset.spec.shape, dataset.spec.num_classes) == ((2, 1, 1), 2)
    assert dataset.train.labels.tolist() == [1, 0, 1]
    inputs = dataset.train.to_samples(dataset.spec).inputs[:, :, 0, 0]
    deviation = np.std([100, 300, 200])
    torch.testing.assert_close(
        inputs[:, 0], torch.tensor([-100, 100, 0], dtype=torch.float32) / float(deviation)
    )
    assert inputs[:, 1].tolist() == [0, 0, 0]  # a constant column is not divided by zero
    test = dataset.test.to_samples(dataset.spec).inputs[0, :, 0, 0]
    torch.testing.assert_close(test, torch.tensor([200 / float(deviation), 1.0]))


@pytest.mark.parametrize(
    ("train", "test", "where", "problem"),
    [
        (["a,label", "Smith,1"], None, "train.csv, line 2", r"2 values.*\(a is no number\)"),
        (["a,label", "1_0,1"], None, "train.csv, line 2", r"2 values.*\(a is no number\)"),
        (["a,b,label", "1,1"], None, "train.csv, line 2", None),
        (["a,label", "1,1", "inf,1"], None, "train.csv, line 3", "a is inf; drop the row$"),
        (
            ["a,label", "nan,1", "1,1", "x,2"],
            None,
            "train.csv, line 2",
            "2 such rows",
        ),
        (["a,b", "1,1"], None, "train.csv", "need one column 'label'"),
        (["a,label"], None, "train.csv", "a header but no rows"),
        (
            FLOWS,
            ["bytes,label", "1,web"],
            "test.csv",
            "columns differ .*duration",
        ),
        (FLOWS, [FLOWS[0], "1,1,game"], "test.csv", r"labels \['game'\]"),
        (["a,label", "1e200,1", "1,2"], None, "train.csv, column 'a'", r"from 1 to 1e\+200"),
        (FLOWS, [FLOWS[0], "1,1,web", "1e60,1,web"], "test.csv, column 'bytes'", "row 2 .*unit"),
    ],
)
def test_a_malformed_table_is_an_error_with_its_line(tmp_path, train, test, where, problem):
    write(tmp_path / "train.csv", *train)
    write(tmp_path / "test.csv", *(test or train))
    with pytest.raises(DatasetError, match=problem, check=at(tmp_path / where)):
        load_dataset("csv", tmp_path)


@pytest.mark.parametrize("offset", [0, 1.7e12, 2.46e6, 1e60])
def test_a_column_with_a_large_offset_keeps_its_differences(tmp_path, offset):
    span = max(60_000, offset / 1e6)
    values = offset + np.linspace(0, span, 50)
    rows = [f"{value!r},{0.1!r},{'ab'[i % 2]}" for i, value in enumerate(values.tolist())]
    for part in ("train", "test"):
        write(tmp_path / f"{part}.csv", "t,unit,label", *rows)
    dataset = load_dataset("csv", tmp_path)
    for samples in (dataset.train, dataset.test):
        inputs = samples.to_samples(dataset.spec).inputs
        assert inputs.dtype == torch.float32
        ramp = torch.linspace(-1, 1, 50)
        torch.testing.assert_close(
            inputs[:, 0, 0, 0], ramp / ramp.std(correction=0), atol=1e-4, rtol=0
        )
        assert not inputs[:, 1].any()  # a constant that floats cannot write exactly


@pytest.mark.parametrize("name", ["ag-news", "sst-2", "csv"])
def test_missing_files_are_an_error_with_the_remedy(tmp_path, name):
    with pytest.raises(DatasetError, match="data-root", check=at("dataset", value=name)):
        load_dataset(name, tmp_path)
