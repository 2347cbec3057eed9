"""Whole runs of auto in this process."""

import json
from collections import defaultdict

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.in_process import FIRST_NODE, run_in_process
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.source import partition_samples

NODES = [{"partition-id": place, "num-partitions": 4} for place in range(4)]
RACE = {
    **{"dataset": "digits", "strategy": "auto", "auto.budget": 0.3, "num-rounds": 7},
    **{"partition.scheme": "pathological", "partition.classes": 3, "train.local-epochs": 1},
    **{"hfldd.distiller": "dm", "hfldd.distilled-size": 10, "hfldd.distill-steps": 5},
}


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("race")
    run_in_process(RACE, NODES, folder)
    return folder / "1"


def choice_of(folder):
    return json.loads((folder / "choice.json").read_text())


def test_each_contest_is_judged_on_what_nodes_hold_out_with_classes_counting_alike(race):
    found, settings = choice_of(race), RunSettings.from_run_config(RACE)
    assert [set(contest) for contest in found["contests"]] == [{"hfldd", "fedavg"}] * 2
    journal = [json.loads(line) for line in (race / "journal.jsonl").read_text().splitlines()]
    evaluations = [entry for entry in journal if entry.get("phase") == "evaluate"]
    assert [entry["round"] for entry in evaluations] == [1, 2, 4, 5]
    for place, contest in enumerate(found["contests"]):
        measured = []
        for evaluation in evaluations[2 * place : 2 * place + 2]:
            of_class = defaultdict(list)  # accuracy and samples of each node that has the class
            for node, numbers in evaluation["nodes"].items():
                samples = partition_samples(settings, int(node) - FIRST_NODE, len(NODES))
                classes = set(samples.labels.tolist())
                for label in classes:
                    part = numbers["num-examples"] / len(classes)
                    of_class[label].append((numbers["eval-accuracy"], part))
            each = [
                np.average([accuracy for accuracy, _ in nodes], weights=[part for _, part in nodes])
                for nodes in of_class.values()
            ]
            measured.append(np.mean(each))
        assert sorted(contest.values()) == pytest.approx(sorted(measured))
    assert sum(each["rounds"] for each in found["tried"]) == RACE["num-rounds"]


def test_the_bytes_of_those_that_raced_are_those_of_the_run(race):
    rows = [json.loads(line) for line in (race / "metrics.jsonl").read_text().splitlines()]
    total = [row["server_bytes"] for row in rows]
    asked = json.loads((race / "traffic.json").read_text())["measured"]["query.label_knowledge"]
    tried = choice_of(race)["tried"]
    assert sum(each["server_bytes"] for each in tried) == total[-1] - total[0] - sum(asked.values())


def test_the_report_shows_how_each_one_did(race):
    page = run_page(read_run(race))
    for contest in choice_of(race)["contests"]:
        for accuracy in contest.values():
            assert f"{accuracy:.1%}" in page


def test_a_run_that_stops_in_a_contest_resumes_to_the_same_model(race, tmp_path):
    run_in_process({**RACE, "keep-checkpoints": 9}, NODES, tmp_path)
    for server_round, file in checkpoints(tmp_path / "1").items():
        if server_round > 4:
            file.unlink()
    run_in_process({**RACE, "resume": "1"}, NODES, tmp_path)
    expected = load_file(race / "model.safetensors")
    for name, array in load_file(tmp_path / "1" / "model.safetensors").items():
        np.testing.assert_array_equal(array, expected[name])
    of_both = choice_of(race)["tried"], choice_of(tmp_path / "1")["tried"]
    for one, resumed in zip(*of_both, strict=True):
        assert one["server_bytes"] <= resumed.pop("server_bytes")  # a resumed run meets its nodes
        assert {**resumed, "server_bytes": one["server_bytes"]} == one
