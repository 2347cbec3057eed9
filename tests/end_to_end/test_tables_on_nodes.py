"""Nodes with tables of their own: hospitals with heart patients, and small generated ones."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from sklearn.linear_model import LogisticRegression

from benchmarks.in_process import run_in_process
from flwr_distill.client.app import app
from flwr_distill.client.secure_sums import SumRefusedError
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.links.digits import NUM_DIGITS
from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.meeting import COLUMNS, DESCRIBE_COLUMNS
from flwr_distill.protocol.messages import METRICS
from flwr_distill.protocol.secure_sums import MASKED, UNMASK, masked_in
from flwr_distill.server.export.prediction import read_model
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.roster import TooFewNodesError
from flwr_distill.task.errors import SettingsError

from .runs import ROOT, command, complete, phases, read, watched

HOSPITALS = ROOT.parent / "shared/data/heart_disease"
SITES = ("cleveland", "hungarian", "long_beach_va", "switzerland")
HEART = {
    "dataset": "private",
    "private.classes": "0,1",
    "private.columns": "age,sex:0|1,cp:1|2|3|4,trestbps,chol,fbs:0|1,restecg:0|1|2,thalach,"
    "exang:0|1,oldpeak",
    "strategy": "fedavg",
    "num-rounds": 10,
    "most-samples": 0.0,
}
SMALL = {
    "dataset": "private",
    "private.classes": "no,yes",
    "private.label": "ill",
    "private.columns": "age,sex:f|m,arrived",
    "strategy": "fedavg",
    "num-rounds": 1,
    "train.local-epochs": 1,
}


def records(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def write_ward(folder, name, rows=60, unit=1.0, header="arrived,age,sex,ill,name"):
    """A table of patients who are ill if they are old; `arrived` is in milliseconds."""
    rng = np.random.default_rng(sum(map(ord, name)))
    ages = rng.normal(60, 12, rows)
    lines = [
        f"{1_750_000_000_000 + int(rng.integers(0, 10**9))},{age * unit:.1f},{'fm'[place % 2]},"
        f"{'yes' if age > 60 else 'no'},Patient {place}"
        for place, age in enumerate(ages)
    ]
    path = folder / f"{name}.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return {"data": str(path), "name": name}


def spec_of(runs):
    return read_run(runs / "1").about["spec"]


def predicted(runs, *tables):
    """Names of the classes by an exported model, row by row."""
    command("runs", "export", runs / "1", "--format", "onnx")
    model = read_model(runs / "1" / "export" / "model.onnx")
    classes = model.description.classes
    return [classes[int(p.argmax())] for table in tables for _, p in model.predictions(table)]


@pytest.mark.slow
@pytest.mark.parametrize("secure_sums", [False, True])
def test_four_hospitals_learn_what_all_their_patients_in_one_table_teach(tmp_path, secure_sums):
    if not HOSPITALS.is_dir():
        pytest.skip(f"no data of the four hospitals in {HOSPITALS}")
    nodes = [{"data": str(HOSPITALS / site / "train.csv"), "name": site} for site in SITES]
    run_in_process(HEART | {"secure-sums": secure_sums}, nodes, tmp_path)
    numbers = ["age", "trestbps", "chol", "thalach", "oldpeak"]
    categories = [tuple(name.split("=")) for name in spec_of(tmp_path)["labels"]["columns"]]
    categories = [pair for pair in categories if len(pair) == 2]

    def encoded(part):
        rows = [row for site in SITES for row in records(HOSPITALS / site / f"{part}.csv")]
        values = np.array([[float(row[name]) for name in numbers] for row in rows])
        ones = np.array([[row[name] == category for name, category in categories] for row in rows])
        return values, ones, np.array([row["label"] for row in rows])

    values, ones, labels = encoded("train")
    mean, deviation = values.mean(axis=0), values.std(axis=0)
    spec = spec_of(tmp_path)
    places = [spec["labels"]["columns"].index(name) for name in numbers]
    assert [spec["mean"][place] for place in places] == pytest.approx(mean.tolist(), rel=1e-9)
    assert [spec["std"][place] for place in places] == pytest.approx(deviation.tolist(), rel=1e-9)
    pooled = LogisticRegression().fit(np.hstack([(values - mean) / deviation, ones]), labels)
    values, ones, labels = encoded("test")
    best = pooled.score(np.hstack([(values - mean) / deviation, ones]), labels)
    assert best > 0.75
    names = predicted(tmp_path, *(HOSPITALS / site / "test.csv" for site in SITES))
    assert np.mean(names == labels) > best - 0.05


def test_all_nodes_standardise_by_the_rows_of_all_and_the_card_says_by_what(tmp_path):
    wards = [write_ward(tmp_path, name, rows) for name, rows in (("a", 60), ("b", 30), ("c", 90))]
    run_in_process(SMALL, wards, tmp_path / "runs")
    rows = [row for ward in wards for row in records(ward["data"])]
    spec = spec_of(tmp_path / "runs")
    assert spec["labels"]["columns"] == ["age", "sex=f", "sex=m", "arrived"]
    for place, name in ((0, "age"), (3, "arrived")):
        values = np.array([float(row[name]) for row in rows])
        assert spec["mean"][place] == pytest.approx(values.mean(), rel=1e-12)
        assert spec["std"][place] == pytest.approx(values.std(), rel=1e-9)
    assert (spec["mean"][1:3], spec["std"][1:3]) == ([0, 0], [1, 1])
    assert len(predicted(tmp_path / "runs", Path(wards[0]["data"]))) == 60
    (card,) = (tmp_path / "runs" / "1" / "export").glob("*.md")
    assert repr(spec["mean"][3]) in card.read_text()


@pytest.mark.parametrize(
    ("ward", "shown"),
    [
        ({"header": "arrived,years,sex,ill,name"}, ("missing age", "years")),
        ({"header": "arrived,age,gender,ill,name"}, ("missing sex", "gender")),
        ({"unit": 1e5}, ("'age'", "unit")),
    ],
)
def test_a_node_with_another_table_is_left_out_by_name_and_its_values_do_not_count(
    tmp_path, ward, shown
):
    alike = [write_ward(tmp_path, name) for name in "abc"]
    odd = write_ward(tmp_path, "ward-9", **ward)
    run_in_process(SMALL, alike, tmp_path / "without")
    run_in_process(SMALL, [*alike, odd], tmp_path / "runs", min_nodes=3)
    about = read_run(tmp_path / "runs" / "1").about
    assert len(about["nodes"]) == 3
    (warning,) = [text for text in about["warnings"] if "ward-9" in text]
    assert all(text in warning for text in shown)
    assert "Patient" not in warning
    assert about["spec"] == spec_of(tmp_path / "without")
    with pytest.raises(TooFewNodesError, match="ward-9"):
        run_in_process(SMALL, [*alike, odd])


def lying(change):
    """The fourth node changes its answer about columns."""

    def watch(place, message, content):
        if place == 3 and message.metadata.message_type == DESCRIBE_COLUMNS:
            change(content)

    return watched(watch)


ARRIVED = 1.75e12
LIES = {
    "NaN": {"mean": [math.nan, ARRIVED], "variance": [144.0, 1e17]},
    "infinity": {"mean": [math.inf, ARRIVED], "variance": [144.0, 1e17]},
    "negative": {"mean": [60.0, ARRIVED], "variance": [-1.0, 1e17]},
    "beyond float64's squares": {"mean": [1e200, ARRIVED], "variance": [144.0, 1e17]},
    "far from others": {"mean": [1e9, ARRIVED], "variance": [144.0, 1e17]},
    "wider than others": {"mean": [60.0, ARRIVED], "variance": [1e12, 1e17]},
    "one column more": {"mean": [60.0, ARRIVED, 1.0], "variance": [144.0, 1e17, 1.0]},
    "two shapes": {"mean": [60.0, ARRIVED], "variance": [144.0]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_hostile_nodes_means_are_its_own_error(tmp_path, lie):
    wards = [write_ward(tmp_path, name) for name in "abcd"]

    arrays = {name: np.array(values) for name, values in LIES[lie].items()}
    wrap = lying(lambda content: content.__setitem__(COLUMNS, as_record(arrays)))
    run_in_process(SMALL, wards[:3], tmp_path / "honest")
    run_in_process(SMALL, wards, tmp_path / "runs", wrap=wrap)
    spec = spec_of(tmp_path / "runs")
    assert (spec["mean"], spec["std"]) == tuple(
        spec_of(tmp_path / "honest")[name] for name in ("mean", "std")
    )


def test_nodes_that_join_later_and_resumed_runs_keep_the_scale(tmp_path):
    wards = [write_ward(tmp_path, name) for name in "ab"]
    run_in_process(SMALL, wards, tmp_path / "runs")
    before = spec_of(tmp_path / "runs")
    more = [*wards, write_ward(tmp_path, "c", 200)]
    config = SMALL | {"num-rounds": 2, "resume": "1"}
    run_in_process(config, more, tmp_path / "runs", min_nodes=2)
    about = read_run(tmp_path / "runs" / "1").about
    assert about["spec"] == before
    assert len(about["nodes"]) == 3


def test_what_must_have_noise_needs_stated_means(tmp_path):
    wards = [write_ward(tmp_path, name) for name in "abc"]
    more = {"train.dp-noise": 1.0}
    with pytest.raises(SettingsError, match=r"private\.columns.*dp-noise.*age:MEAN"):
        run_in_process(SMALL | more, wards)
    kinds = []
    watch = watched(lambda place, message, content: kinds.append(message.metadata.message_type))
    stated = {"private.columns": "age:60+-12,sex:f|m,arrived:1.75e12+-1e9"}
    run_in_process(SMALL | more | stated, wards, tmp_path / "runs", wrap=watch)
    assert DESCRIBE_COLUMNS not in kinds
    assert spec_of(tmp_path / "runs")["mean"] == [60.0, 0.0, 0.0, 1.75e12]


def columns_into(seen):
    """Keep the nodes' answers about columns, by their places."""

    def watch(place, message, content):
        if message.metadata.message_type == DESCRIBE_COLUMNS:
            seen[place] = content

    return watched(watch)


SUMMED = SMALL | {"secure-sums": True}


def test_under_secure_sums_the_server_learns_the_scale_and_no_nodes_part(tmp_path):
    wards = [write_ward(tmp_path, name, rows) for name, rows in (("a", 60), ("b", 30), ("c", 90))]
    seen = {}
    run_in_process(SMALL, wards, tmp_path / "plain")
    run_in_process(SUMMED, wards, tmp_path / "runs", wrap=columns_into(seen))
    plain, summed = spec_of(tmp_path / "plain"), spec_of(tmp_path / "runs")
    assert summed["mean"] == pytest.approx(plain["mean"], rel=1e-15)
    assert summed["std"] == pytest.approx(plain["std"], rel=1e-12)
    assert list(seen) == [0, 1, 2]
    rows = {len(records(ward["data"])) for ward in wards}
    for content in seen.values():
        assert set(content) == {MASKED, METRICS}
        assert not content[METRICS]
        masked = masked_in(content[MASKED])
        own = masked.view(np.int64) * 2.0**-20
        assert not rows & set(own.tolist())
        assert np.median(np.abs(own)) > 2.0**40  # digits without masks are below 2^16
    (phase,) = phases(tmp_path / "runs/1", DESCRIBE_COLUMNS)
    assert (phase["round"], len(phase["nodes"])) == (0, 3)


@pytest.mark.parametrize(("step", "are_in"), [(DESCRIBE_COLUMNS, "abc"), (UNMASK, "abcd")])
def test_a_node_that_drops_out_of_the_sum_costs_its_own_values_at_most(tmp_path, step, are_in):
    wards = [write_ward(tmp_path, name, 20 + 10 * place) for place, name in enumerate("abcd")]
    steps = []

    def lost(place, node):
        def answer(message):
            kind = message.metadata.message_type
            if place == 3 and kind == step and not steps.count(step):
                steps.append(kind)
                raise RuntimeError("lost")
            return node(message)

        return answer

    run_in_process(SUMMED, wards, tmp_path / "runs", wrap=lost)
    check_scale_of(wards[: len(are_in)], tmp_path / "runs")
    assert len(read_run(tmp_path / "runs" / "1").about["nodes"]) == 4


def check_scale_of(wards, runs):
    ages = np.array([float(row["age"]) for ward in wards for row in records(ward["data"])])
    spec = spec_of(runs)
    assert spec["mean"][0] == pytest.approx(ages.mean(), rel=1e-12)
    assert spec["std"][0] == pytest.approx(ages.std(), rel=1e-9)


def test_more_nodes_than_a_sum_can_have_are_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_distill.server.columns.MAX_NODES", 3)
    wards = [write_ward(tmp_path, name, 20) for name in "abcdef"]
    run_in_process(SUMMED, wards, tmp_path / "runs")
    check_scale_of(wards, tmp_path / "runs")
    sums = phases(tmp_path / "runs/1", DESCRIBE_COLUMNS)
    assert [len(phase["nodes"]) for phase in sums] == [3, 3]


def test_a_hostile_node_in_the_sum_is_left_out_if_it_sends_another_form(tmp_path):
    wards = [write_ward(tmp_path, name, 20) for name in "abcd"]
    longer = as_record({MASKED: np.zeros(99_999, np.uint64)})
    wrap = lying(lambda content: content.__setitem__(MASKED, longer))
    run_in_process(SUMMED, wards, tmp_path / "runs", wrap=wrap)
    check_scale_of(wards[:3], tmp_path / "runs")


@pytest.mark.parametrize("shift", [1, 2**28, 2**62])
def test_a_hostile_node_that_spoils_the_sum_stops_the_run(tmp_path, shift):
    """By sums that no rows have, by a scale that fits no other node, or by masks."""
    spoilt = []

    def change(content):
        spoilt.append(content)
        masked = masked_in(content[MASKED]).copy()
        masked[(NUM_DIGITS if shift == 1 else 0) :][60:NUM_DIGITS] += np.uint64(shift)
        content[MASKED] = as_record({MASKED: masked})

    wards = [write_ward(tmp_path, name, 20) for name in "abcd"]
    with pytest.raises((SettingsError, TooFewNodesError), match=r"'age'|=age:MEAN"):
        run_in_process(SUMMED, wards, wrap=lying(change))
    assert len(spoilt) == 1


def test_a_node_in_another_unit_stops_a_run_in_which_nobody_can_compare_nodes(tmp_path):
    wards = [write_ward(tmp_path, name) for name in "abc"]
    with pytest.raises(TooFewNodesError, match=r"'age'.*unit"):
        run_in_process(SUMMED, [*wards, write_ward(tmp_path, "ward-9", unit=1e5)])


@pytest.mark.parametrize("strategy", ["fedavg", "fedmedian"])
def test_a_node_of_a_run_with_secure_sums_tells_no_means_without_masks(tmp_path, strategy):
    """Whatever the server says, and where the strategy has no masks."""
    config = {**SUMMED, "strategy": strategy}
    context = Context(1, 2, write_ward(tmp_path, "a"), RecordDict(), config)
    message = Message(RecordDict(), 2, DESCRIBE_COLUMNS)
    with pytest.raises(SumRefusedError, match="masks"):
        app(message, context)


def test_means_of_few_rows_do_not_leave_a_node(tmp_path):
    wards = [write_ward(tmp_path, name, rows) for name, rows in (("a", 60), ("few", 9))]
    sent = {}
    run_in_process(SMALL, wards, tmp_path / "runs", wrap=columns_into(sent))
    assert list(sent) == [0]
    assert len(read_run(tmp_path / "runs" / "1").about["nodes"]) == 2


@pytest.mark.slow
def test_tables_are_learnt_with_real_processes(tmp_path):
    wards = [write_ward(tmp_path, name) for name in "abc"]
    data = [Path(ward["data"]) for ward in wards]
    with LocalFederation(3, tmp_path / "state", data=data) as federation:
        about = read(complete(federation, tmp_path / "runs", SMALL), "about")
    assert len(about["nodes"]) == 3
    assert about["spec"]["mean"][0] == pytest.approx(60, abs=3)
