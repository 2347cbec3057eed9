"""`flwr-distill stats`: nodes count, policies round, and the node that would fail is named."""

import json

import numpy as np
import pytest
from PIL import Image

from benchmarks.in_process import run_in_process
from flwr_distill.fleet.local_federation import LocalFederation

from .runs import command, phases

IMAGES = 'dataset="private" private.classes="cat,dog" private.shape="3x12x12"'
TABLE = {
    "dataset": "private",
    "private.classes": "no,yes",
    "private.label": "ill",
    "private.columns": "age:50+-10,chol",
    "strategy": "fedavg",
    "statistics": True,
    "num-rounds": 0,
    "min-nodes": 2,
}


def site(folder, classes, mode):
    """25 images of each class."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for place in range(25):
            pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{place}.png")
    return folder


@pytest.mark.slow
def test_a_node_with_other_classes_and_channels_is_named_beside_what_each_holds(tmp_path):
    pets = site(tmp_path / "a", ["cat", "dog"], "RGB"), site(tmp_path / "b", ["cat", "dog"], "RGB")
    data = [*pets, site(tmp_path / "c", ["cat", "wolf"], "L")]
    policy = {"policy": {"extends": "standard", "statistics": "allowed"}}
    with LocalFederation(3, tmp_path / "state", data=data, node_settings=policy) as federation:
        where = ("--state-dir", federation.state_dir, "-c", f'{IMAGES} runs-dir="{tmp_path}/runs"')
        shown = command("stats", *where, "--json", tmp_path / "nodes.json")
    (folder,) = (tmp_path / "runs").iterdir()
    assert not phases(folder, "train")
    content = json.loads((tmp_path / "nodes.json").read_text())
    classes = {node["name"]: node["tables"]["class"] for node in content["nodes"]}
    usual, odd = {"cat": 20, "dog": 20}, {"cat": 20, "wolf": 20}
    assert classes == {"node-0": usual, "node-1": usual, "node-2": odd}, "25 each"
    assert "other classes than the run's, wolf" in shown
    assert "node-2: images are grey" in shown
    page = (folder / "report.html").read_text()
    assert "What would fail" in page
    assert all(text in page for text in content["nodes"][2]["tables"])
    assert "https://" not in page


def test_a_node_with_an_empty_column_is_named_though_it_cannot_take_part(tmp_path):
    rows = [f"{40 + place},{150 + place},{'no' if place % 2 else 'yes'}" for place in range(40)]
    empty = [f"{40 + place},,no" for place in range(40)]
    for name, lines in (("whole", rows), ("empty", empty)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,chol,ill", *lines]))
    nodes = [{"data": str(tmp_path / f"{name}.csv"), "name": name} for name in ("whole", "empty")]
    run_in_process(TABLE, nodes, tmp_path / "runs")
    content = json.loads((tmp_path / "runs" / "1" / "statistics.json").read_text())
    assert any(line.startswith("empty: column chol is empty") for line in content["warnings"])
    by_name = {node["name"]: node for node in content["nodes"]}
    assert by_name["empty"]["tables"]["column chol"] == {"(missing)": 40}
    assert by_name["whole"]["tables"]["class"] == {"no": 20, "yes": 20}
    assert by_name["whole"]["floor"] == 10, "without a guard the app rounds"
    assert (tmp_path / "runs" / "1" / "report.html").exists()


@pytest.mark.parametrize(
    ("setting", "value"), [("secure-sums", True), ("strategy", "hfldd"), ("num-rounds", 3)]
)
def test_a_run_with_statistics_does_nothing_else(tmp_path, setting, value):
    with pytest.raises(ValueError, match=setting):
        run_in_process({**TABLE, setting: value}, [{}, {}], tmp_path / "runs")
