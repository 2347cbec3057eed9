"""Names of classes and columns mean the same on all nodes, in a model and in its report."""

import numpy as np
import onnx
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.in_process import run_in_process
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.server.export.description import KEY, Description
from flwr_distill.server.export.prediction import read_model
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.roster import TooFewNodesError
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import LabelMap

from .runs import complete, export

WITHIN = 0.01


PICTURES = {
    "dataset": "private",
    "private.shape": "1x8x8",
    "model": "random-features",
    "strategy": "analytic",
    "num-rounds": 1,
    "train.holdout": 0.0,
}
GRADES = (1, 2, 3, 4)
WORDS = {1: "mild", 2: "moderate", 3: "severe", 4: "fatal"}


def write_site(folder, name, digits=GRADES, numbers=range(200)):
    """Pictures of digits, by number of the sample, in class folders; returns files and names."""
    data, written = load_digits(), []
    for number in numbers:
        if (digit := int(data.target[number])) in digits:
            file = folder / name(digit) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = (data.images[number] * 255 / 16).astype(np.uint8)
            Image.fromarray(pixels).save(file)
            written.append((file, name(digit)))
    return written


def accuracy_of_grades(folder, name, classes):
    """Accuracy by the names that an exported model gives new pictures; a site misses one grade."""
    write_site(folder / "a", name, GRADES, range(0, 1500, 2))
    write_site(folder / "b", name, GRADES[:-1], range(1, 1500, 2))
    new = write_site(folder / "new", name, GRADES, range(1500, 1797))
    nodes = [{"data": str(folder / site)} for site in "ab"]
    run_in_process({**PICTURES, "private.classes": classes}, nodes, folder / "runs")
    model = read_model(export(folder / "runs" / "1")[0])
    names = model.description.classes
    return np.mean([names[int(model.probabilities(f).argmax())] == grade for f, grade in new])


@pytest.mark.slow
def test_grades_from_1_on_are_learnt_and_called_as_those_that_have_names(tmp_path):
    best = accuracy_of_grades(tmp_path / "words", WORDS.get, ",".join(WORDS.values()))
    assert best > 0.9
    numbers = accuracy_of_grades(tmp_path / "numbers", str, "1,2,3,4")
    assert numbers == pytest.approx(best, abs=WITHIN)


def write_table(folder, labels=("8", "9", "10"), columns=("c0", "c1", "c2"), places=(0, 1, 2)):
    """A table whose column i is large for label i; `places` is the order of the columns."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 300), ("test", 150)):
        classes = rng.integers(0, len(labels), count)
        rows = rng.normal(size=(count, len(columns)))
        rows[np.arange(count), classes] += 4
        lines = [
            ",".join([*(f"{row[place]:.3f}" for place in places), labels[label]])
            for row, label in zip(rows, classes, strict=True)
        ]
        header = ",".join([*(columns[place] for place in places), "label"])
        (folder / f"{part}.csv").write_text("\n".join([header, *lines]) + "\n")
    return {"data-root": str(folder), "num-partitions": 1, "partition-id": 0}


TABLES = {
    "dataset": "csv",
    "strategy": "fedavg",
    "num-rounds": 3,
    "partition.scheme": "iid",
    "train.optimizer": "adam",
    "train.lr": 0.01,
}


def test_a_tables_labels_are_named_in_report_card_exports_and_curves(tmp_path):
    node = write_table(tmp_path / "table")
    config = {**TABLES, "data-root": str(tmp_path / "table")}
    rows = run_in_process(config, [node], tmp_path / "runs")
    names, columns = ("8", "9", "10"), ("c0", "c1", "c2")
    digest = LabelMap(names, columns).digest
    file, card = export(tmp_path / "runs" / "1", "onnx")
    (entry,) = [p for p in onnx.load(file).metadata_props if p.key == KEY]
    spec = Description.from_json(entry.value).spec
    assert (spec.class_names, spec.labels.columns) == (names, columns)
    assert spec.labels.digest == digest
    run = read_run(tmp_path / "runs" / "1")
    assert run.about["labels"] == digest
    assert all(text in card for text in ("8, 9, 10", "c0, c1, c2", digest))
    accuracies = ", ".join(
        f"{name}: {100 * accuracy:.1f} %"
        for name, accuracy in zip(names, rows[-1]["class_accuracy"], strict=True)
    )
    assert accuracies in card
    page = run_page(run)
    assert all(text in page for text in ("class 8", "class 10", digest))
    assert "class 0" not in page
    events = EventAccumulator(str(tmp_path / "runs" / "1"))
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if "class" in tag}
    assert tags == {f"class_accuracy/{name}" for name in names}


def test_columns_in_another_order_are_learnt_as_well(tmp_path):
    config = {**TABLES, "data-root": str(tmp_path / "server")}
    same = write_table(tmp_path / "server")
    swapped = write_table(tmp_path / "swapped", places=(2, 0, 1))
    best = run_in_process(config, [same, same])[-1]["accuracy"]
    assert best > 0.9
    assert run_in_process(config, [same, swapped])[-1]["accuracy"] == best


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ({"labels": ("8", "9", "11")}, ("8, 9 and 11", "8, 9 and 10")),
        ({"labels": ("08", "9", "10")}, ("08", "8, 9 and 10")),
        ({"columns": ("c0", "c1", "d2")}, ("c0, c1 and d2", "c0, c1 and c2")),
        (
            {"columns": ("c0", "c1", "c2", "c3"), "places": (0, 1, 2, 3)},
            ("c0, c1, c2 and c3", "c0, c1 and c2"),
        ),
    ],
    ids=["labels", "spelling", "another column", "a column more"],
)
def test_a_node_whose_table_has_other_names_is_left_out_with_both_versions(tmp_path, own, shown):
    config = {**TABLES, "data-root": str(tmp_path / "server"), "num-rounds": 1}
    same = write_table(tmp_path / "server")
    odd = {**write_table(tmp_path / "odd", **own), "name": "ward-9"}
    run_in_process(config, [same, same, odd], tmp_path / "runs", min_nodes=2)
    about = read_run(tmp_path / "runs" / "1").about
    assert len(about["nodes"]) == 2
    (warning,) = [text for text in about["warnings"] if "ward-9" in text]
    assert all(text in warning for text in shown)
    with pytest.raises(TooFewNodesError, match="ward-9"):
        run_in_process(config, [same, same, odd])


def test_pictures_for_a_named_set_are_sorted_by_its_labels_and_not_by_other_names(tmp_path):
    """In order of their names, the digits of such folders would be other ones."""
    words = ("nil", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    for site, names in enumerate([tuple(map(str, range(10))), words]):
        write_site(tmp_path / str(site), names.__getitem__, range(10))
    nodes = [{"data": str(tmp_path / str(site))} for site in range(2)]
    config = {**PICTURES, "dataset": "digits"}
    run_in_process(config, nodes, tmp_path / "runs", min_nodes=1)
    about = read_run(tmp_path / "runs" / "1").about
    assert [node["name"] for node in about["nodes"].values()] == ["node-0"]
    assert any("node-1" in text for text in about["warnings"])


@pytest.fixture
def five_sites(tmp_path):
    """Two sites name grades by numbers, and three by words."""
    data = [tmp_path / f"site-{site}" for site in range(5)]
    for folder, name in zip(data, [str, str, WORDS.get, WORDS.get, WORDS.get], strict=True):
        write_site(folder, lambda digit, name=name: f"grade {name(digit)}")
    return data


BY_FOLDERS = {**PICTURES, "private.num-classes": 4, "min-nodes": 2}
NAMES = [f"grade {digit}" for digit in GRADES]


def test_a_resumed_run_keeps_the_names_that_its_nodes_agreed_on(tmp_path, five_sites):
    """Though most of those that are back name classes otherwise."""
    config = {**BY_FOLDERS, "strategy": "fedavg"}
    nodes = [{"data": str(folder), "partition-id": i} for i, folder in enumerate(five_sites)]
    run_in_process(config, nodes[:2], tmp_path / "runs")
    run = tmp_path / "runs" / "1"
    assert read_run(run).class_names == NAMES
    config |= {"num-rounds": 2, "resume": "1"}
    run_in_process(config, nodes, tmp_path / "runs", min_nodes=2)
    assert read_run(run).class_names == NAMES
    assert len(read_run(run).about["nodes"]) == 2


def test_too_few_nodes_with_the_same_folders_end_the_run_with_the_setting_to_give(five_sites):
    nodes = [{"data": str(folder)} for folder in five_sites[1:3]]
    with pytest.raises(SettingsError, match=r"private\.classes=.*grade 4.*severe"):
        run_in_process(BY_FOLDERS, nodes)


@pytest.mark.slow
def test_classes_that_nobody_names_are_called_by_their_positions_and_the_card_says_so(tmp_path):
    data = load_digits()
    images = (data.images * 255 / 16).astype(np.uint8)
    np.savez(tmp_path / "own.npz", images=images[:300], labels=data.target[:300])
    run_in_process(PICTURES, [{"data": str(tmp_path / "own.npz")}], tmp_path / "runs")
    file, card = export(tmp_path / "runs" / "1")
    assert read_model(file).description.classes == tuple("0123456789")
    assert "positions" in card


@pytest.mark.slow
def test_names_from_nodes_have_no_meaning_in_a_card(tmp_path):
    odd = ("![x](http", "<b>bold", "a|b`c\\d")
    write_site(tmp_path / "own", lambda digit: odd[digit], range(3))
    config = {**PICTURES, "private.num-classes": 3}
    run_in_process(config, [{"data": str(tmp_path / "own")}], tmp_path / "runs")
    _, card = export(tmp_path / "runs" / "1")
    assert not any(name in card for name in odd)
    assert r"\<b\>bold" in card


@pytest.mark.slow
def test_a_node_with_other_class_folders_is_left_out_with_real_processes(tmp_path, five_sites):
    with LocalFederation(3, tmp_path / "state", data=five_sites[:3]) as federation:
        run = read_run(complete(federation, tmp_path / "runs", BY_FOLDERS))
    (warning,) = [text for text in run.about["warnings"] if "node-2" in text]
    assert all(text in warning for text in ("grade mild", "grade 1"))
    assert run.class_names == NAMES
