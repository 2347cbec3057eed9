"""The benchmark of GPUs can be tried without one, and says what it would need."""

import json
import logging
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu, gpu_work
from benchmarks.distill_steps import PAPERS, TINY, Setting
from benchmarks.gpu_goals import GOALS, StepGoal
from benchmarks.gpu_profile import Activities, LaunchCosts, StepProfile
from benchmarks.gpu_work import QUICK, WORK, Work
from flwr_distill.distill.registry import _DISTILLERS
from flwr_distill.task.compute import cuda_graph
from tests.task import cpu_graphs

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
PIECES = ["distil-kip-n400", "train-digits-cnn-16-float32"]
COUNTS = ["launches", "waits", "copies", "flop", "bytes"]
SHORT = gpu.Effort(300, least_steps=1, steps_seconds=0, way_seconds=0, repeats=3)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the program on the CPU; returns its exit status and report."""

    def run(*names):
        file = tmp_path / "gpu.json"
        arguments = ["--quick", "--device", "cpu", "--only", *names, "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
        monkeypatch.setattr(gpu, "TINY_EFFORT", SHORT)
        status = gpu.main()
        return status, json.loads(file.read_text())

    return run


@pytest.mark.usefixtures("virtual_device")
def test_it_measures_what_was_asked_for_beside_its_counts_and_floor(run, capsys):
    status, report = run(*PIECES)
    printed = capsys.readouterr().out
    assert status == 0
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
    kip, training = (report["rows"][name] for name in PIECES)
    assert kip["published_by_ours"] == pytest.approx(
        kip["published"]["milliseconds"] / kip["eager"]["milliseconds"]
    )
    assert 0 < training["launches"] <= 50
    assert training["waits"] == training["copies"] == 0
    assert {goal["verdict"] for goal in report["goals"]} == {"not measured"}


def test_a_row_that_fails_is_reported_and_the_others_are_measured(run, monkeypatch):
    def broken(setting):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(WORK, "train-privately", Work(broken))
    monkeypatch.setattr(gpu, "all_counts", lambda names, *_: dict.fromkeys(names, ValueError("no")))
    status, report = run("train-privately", PIECES[1])
    assert status == 1
    assert report["rows"]["train-privately"]["error"] == "RuntimeError: out of memory"
    assert report["rows"][PIECES[1]]["milliseconds"] > 0
    assert report["rows"][PIECES[1]]["not_counted"] == "ValueError: no"


def test_what_is_not_counted_in_time_does_not_hold_up_the_rest():
    counts = gpu.all_counts(PIECES, PAPERS, within=0.01)
    assert list(counts) == PIECES
    assert all("not counted within 0.01 s" in str(count) for count in counts.values())


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
    measured = {name.removeprefix("distil-") for name in WORK if name.startswith("distil-")}
    assert {*_DISTILLERS, "ensemble"} - {"auto"} <= measured


def test_a_node_that_fails_fails_the_measurement_of_a_run(monkeypatch):
    def broken(message, context):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("benchmarks.in_process.client_app", broken)
    run = gpu_work.federation(Setting(CPU, TINY), "fedavg")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(1)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_quick_run_keeps_the_sizes_of_the_goals_on_a_gpu(device, monkeypatch):
    seen = []

    def measured(bench, work, counts):
        seen.append((bench.setting.sizes, work))
        return {"milliseconds": 1.0}

    monkeypatch.setattr(sys, "argv", ["gpu", "--quick"])
    monkeypatch.setattr(gpu, "choose_device", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(gpu, "all_counts", lambda names, *_: dict.fromkeys(names))
    monkeypatch.setattr(gpu, "launch_costs", lambda device: LaunchCosts(1.0, 5.0, 4.0))
    monkeypatch.setattr(gpu, "profiler_error", lambda device: "no CUPTI")
    monkeypatch.setattr(gpu.Bench, "row", measured)
    monkeypatch.setattr(gpu, "_line", lambda row: "")
    assert gpu.main() == 0
    assert {sizes for sizes, _ in seen} == {TINY if device == CPU else PAPERS}
    assert {row for goal in GOALS for row in goal.rows} <= set(QUICK)
    assert [work for _, work in seen] == [WORK[name] for name in QUICK]


@pytest.fixture
def graphs(virtual_device, monkeypatch):
    """A virtual GPU, with stand-ins for CUDA's graphs."""
    with virtual_device():
        created = cpu_graphs.install(monkeypatch)

        class Graph(cpu_graphs.CpuGraph):
            def __init__(self):
                super().__init__()
                created.append(self)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        yield created


def test_steps_are_measured_as_graphs_and_kernel_by_kernel(graphs, monkeypatch):
    seen = Activities.of({"traceEvents": []})
    profile = StepProfile(0.0, kernels=50, waits=2, busy_milliseconds=0.1, seen=seen)
    monkeypatch.setattr(gpu, "step_profile", lambda *_: profile)
    bench = gpu.Bench(Setting(GPU, TINY), SHORT, LaunchCosts(2.0, 5.0, 4.0), profiler=True)
    row = bench.row(WORK[PIECES[1]], dict.fromkeys(COUNTS, 1))
    assert row["way"] == "graph"
    assert row["milliseconds"] == row["graph"]["milliseconds"]
    assert "eager" in row
    assert "not_recorded" not in row
    assert row["launch_floor_milliseconds"] == pytest.approx(50 * 2.0 / 1e3)
    assert row["graph_by_launch_floor"] == pytest.approx(row["milliseconds"] / 0.1)
    assert row["most_waits"] == 2


def test_a_step_that_is_not_recorded_is_reported(graphs, monkeypatch, caplog):
    def refusing(step, *_):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(cuda_graph, "_Recording", refusing)
    monkeypatch.setattr(gpu, "step_profile", lambda *_: StepProfile(0.0))
    bench = gpu.Bench(Setting(GPU, TINY), SHORT, LaunchCosts(2.0, 5.0, 4.0), profiler=False)
    with caplog.at_level(logging.INFO, "task"):
        row = bench.row(WORK[PIECES[1]], dict.fromkeys(COUNTS, 1))
    assert "operation not permitted" in row["not_recorded"]
    assert "graph" not in row
    assert row["way"] == "eager"


def test_without_graphs_nothing_is_recorded(graphs):
    run = WORK[PIECES[1]].prepare(Setting(GPU, TINY))
    with gpu_work.without_graphs():
        run(4)
    assert graphs == []
    run(4)
    assert [graph.replays for graph in graphs] == [3]


ROWS = {"a": {"speed": 6.0}, "b": {"speed": 4.0}, "failed": {"error": "RuntimeError"}}
FAST = StepGoal("fast", ("a", "b"), "speed", at_least=5)


@pytest.mark.parametrize(
    ("goal", "on_gpu", "verdict", "measured", "missed_by"),
    [
        (FAST, True, "missed", 4.0, ["b"]),
        (FAST, False, "not measured", None, []),
        (replace(FAST, at_least=3), True, "met", 4.0, []),
        (StepGoal("slow", ("a", "b"), "speed", at_most=5), True, "missed", 6.0, ["a"]),
        (replace(FAST, rows=("a", "failed")), True, "not measured", 6.0, []),
        (replace(FAST, rows=("a", "elsewhere")), True, "not measured", 6.0, []),
        (replace(FAST, rows=("b", "failed")), True, "missed", 4.0, ["b"]),
    ],
)
def test_a_goal_is_judged_by_its_worst_row(goal, on_gpu, verdict, measured, missed_by):
    judged = goal.judged(ROWS, on_gpu)
    assert judged["verdict"] == verdict
    assert judged["met"] == {"met": True, "missed": False, "not measured": None}[verdict]
    assert judged["measured"] == measured
    assert judged["missed_by"] == missed_by


def test_goals_name_rows_that_are_there_and_numbers_that_rows_have():
    assert {goal.number for goal in GOALS} <= {
        "published_by_ours",
        "graph_by_launch_floor",
        "most_waits",
    }
    for goal in GOALS:
        for name in goal.rows:
            assert WORK[name].published or goal.number != "published_by_ours"
            assert WORK[name].recorded or goal.number != "graph_by_launch_floor"
