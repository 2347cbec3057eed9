"""The arena: what its runs measure, that they are kept, and what its tables say."""

import json
import sys
from concurrent.futures import Future

import numpy as np
import pytest

from benchmarks import arena, domains
from benchmarks.arena_tables import Cell, heat_map, tables
from flwr_distill.task.datasets import load_dataset


def cell(strategy, skew, accuracy, **changes):
    values = {
        "after": {5: accuracy},
        "rounds_to_goal": None,
        "server_bytes": 2e6,
        "link_bytes": 1e6,
        "node_seconds": 1.5,
        "mean_node": 0.5,
        "worst_node": 0.25,
        "seeds": 1,
    }
    return Cell(strategy=strategy, skew=skew, accuracy=accuracy, **{**values, **changes})


def result(*accuracies):
    return arena.Result(list(accuracies), 10, 4, 2.0, 0.75, 0.5)


@pytest.fixture
def in_one_process(monkeypatch):
    """The pool's work is done here; returns the runs that were played."""
    played = []

    class Pool:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, play, run, data_root):
            done = Future()
            try:
                played.append(run)
                done.set_result(play(run, data_root))
            except Exception as error:
                done.set_exception(error)
            return done

    monkeypatch.setattr(arena, "ProcessPoolExecutor", Pool)
    return played


def test_a_run_is_measured_and_evaluation_costs_no_bytes():
    run = arena.Run("fedavg", "two classes", 0, 1, "digits")
    outcome = arena.play(run, "")
    model = 18_600  # 4,650 weights
    assert len(outcome.accuracies) == 2
    assert outcome.link_bytes == 0
    assert outcome.server_bytes == pytest.approx(2 * 10 * 4 * model, rel=0.1)
    assert 0 <= outcome.worst_node < outcome.mean_node < max(outcome.accuracies)
    assert 0 < outcome.node_seconds < 60


def test_an_interrupted_arena_goes_on_and_a_failed_run_is_tried_again(
    in_one_process, monkeypatch, tmp_path, capsys
):
    broken = ["hfldd"]

    def play(run, data_root):
        if run.strategy in broken:
            raise ValueError("no head")
        return result(0.1, 0.2, 0.3)

    monkeypatch.setattr(arena, "play", play)
    runs = [arena.Run(name, "IID", 0, 2, "digits") for name in ("fedavg", "hfldd")]
    stored = tmp_path / "runs.jsonl"
    assert list(arena.play_all(runs, "", 1, stored)) == runs[:1]
    assert "no head" in capsys.readouterr().err
    with stored.open("a") as file:
        file.write('{"run": {"strat')
    broken.clear()
    in_one_process.clear()
    assert list(arena.play_all(runs, "", 1, stored)) == runs
    assert in_one_process == runs[1:]
    assert list(arena.play_all(runs, "", 1, stored)) == runs


def test_a_cell_has_means_of_three_rounds_and_of_the_seeds():
    curves = [0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.9], [0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 0.9]
    runs = {
        arena.Run("cadis", "IID", seed, 6, "digits"): result(*curve)
        for seed, curve in enumerate(curves)
    }
    (measured,) = arena.cells(runs)
    assert measured.after == {5: pytest.approx(np.mean([[0.5, 0.6, 0.7], [0.7, 0.8, 0.9]]))}
    assert measured.accuracy == pytest.approx(np.mean([[0.6, 0.7, 0.9], [0.8, 0.9, 0.9]]))
    assert measured.rounds_to_goal == 5
    assert measured.seeds == 2
    assert measured.as_json()["bytes"] == 14


def test_the_heat_map_marks_the_best_of_each_column_and_leaves_out_what_did_not_run():
    filled = [cell("a", "x", 0.5), cell("a", "y", 0.9), cell("b", "x", 0.75)]
    filled.append(cell("b", "y", None, after={}))
    (axes,) = heat_map(filled).axes
    assert {(t.get_text(), t.get_weight()) for t in axes.texts} == {
        ("50.0", "normal"), ("90.0", "bold"), ("75.0", "bold"),
    }  # fmt: skip
    by_title = dict(tables(filled))
    assert by_title["accuracy after 5 rounds (%)"].rows == [
        ["a", "50.0", "90.0"],
        ["b", "75.0", "-"],
    ]
    assert "accuracy after 20 rounds (%)" not in by_title
    assert by_title["seeds"].rows == [["a", "1", "1"], ["b", "1", "1"]]


def test_quick_has_five_skews_and_seven_strategies(monkeypatch, tmp_path):
    monkeypatch.setattr(
        arena, "play_all", lambda runs, *rest: {run: result(0.1, 0.2, 0.3) for run in runs}
    )
    file = tmp_path / "arena.json"
    monkeypatch.setattr(
        sys, "argv", ["arena", "--quick", "--out", str(tmp_path), "--json", str(file)]
    )
    arena.main()
    written = json.loads(file.read_text())["cells"]
    assert len(written) == 35
    assert {"strategy", "skew", "accuracy", "bytes"} <= written[0].keys()
    assert {"arena.html", "arena.md", "arena.png"} <= {path.name for path in tmp_path.iterdir()}


def test_quick_leaves_what_is_given(monkeypatch):
    ran = []
    monkeypatch.setattr(arena, "play_all", lambda runs, *rest: ran.extend(runs) or {})
    given = ["--strategies", "fednova", "--seeds", "4", "5"]
    monkeypatch.setattr(sys, "argv", ["arena", "--quick", *given])
    arena.main()
    assert {(run.strategy, run.seed) for run in ran} == {("fednova", 4), ("fednova", 5)}
    assert {run.skew for run in ran} == set(arena.QUICK_SKEWS)
    assert {run.rounds for run in ran} == {arena.QUICK_ROUNDS}


def test_nodes_of_three_domains_share_no_sample_and_no_domain():
    dealt = arena._indices_of_domains()
    samples = np.concatenate([dealt[str(node)] for node in range(arena.NODES)])
    plain, changed = load_dataset("digits").train, domains.digits(None, False).train
    assert sorted(samples) == list(range(len(plain)))
    for node, indices in dealt.items():
        own, before = changed.images[indices].astype(int), plain.images[indices].astype(int)
        if int(node) % 3 == 0:
            assert (own == before).all()
        elif int(node) % 3 == 1:
            assert (own == 255 - before).all()
        else:
            assert (own[..., 0] == before[..., 0]).all()
            assert (own[..., -1] == 255 - before[..., -1]).all()
