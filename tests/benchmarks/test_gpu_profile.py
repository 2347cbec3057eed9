"""A trace of the profiler tells kernels, gaps and waits."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_profile
from benchmarks.gpu_profile import Activities


def event(category, name, start, duration):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("cpu_op", "aten::add", 0, 50),
        event("cuda_runtime", "cudaGraphLaunch", 1, 5),
        event("cuda_runtime", "cudaStreamSynchronize", 60, 9),
        event("cuda_runtime", "cudaMemcpyAsync", 61, 1),
        event("kernel", "gemm", 30, 10),
        event("kernel", "add", 10, 2),
        event("kernel", "long", 35, 25),
        event("kernel", "inside", 41, 4),
        event("gpu_memcpy", "Memcpy DtoD", 61, 1),
        event("kernel", "add", 70, 3),
        event("gpu_user_annotation", "a step", 0, 100),
    ]
}


def test_kernels_copies_and_calls_are_counted():
    seen = Activities.of(TRACE)
    assert (seen.kernels, seen.copies, seen.waits, seen.graphs) == (5, 1, 1, 1)


def test_the_costliest_kernels_are_those_with_the_most_time_in_all():
    costliest = Activities.of(TRACE).costliest(most=3)
    assert [(x["name"], x["times"], x["microseconds"]) for x in costliest] == [
        ("long", 1, 25),
        ("gemm", 1, 10),
        ("add", 2, 5),
    ]
    assert costliest[0]["share"] == pytest.approx(25 / 45)


def test_gaps_are_times_in_which_no_stream_does_anything():
    gaps = Activities.of(TRACE).longest_gaps()
    assert [(x["after"], x["before"], x["microseconds"]) for x in gaps] == [
        ("add", "gemm", 18),
        ("Memcpy DtoD", "add", 8),
        ("long", "Memcpy DtoD", 1),
    ]


def test_what_runs_at_the_same_time_counts_once():
    assert Activities.of(TRACE).busy() == 2 + 30 + 1 + 3


def test_the_end_of_a_trace_leaves_preparations_out():
    assert [x.name for x in Activities.of(TRACE).last(2).on_gpu] == ["Memcpy DtoD", "add"]
    assert Activities.of(TRACE).last(0).on_gpu == []


def test_a_trace_of_this_pytorch_can_be_read(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    for e in trace["traceEvents"]:
        if e.get("cat") == "cpu_op":
            e["cat"] = "kernel"
    seen = Activities.of(trace)
    assert {"aten::ones", "aten::add_"} <= {x.name for x in seen.on_gpu}
    assert seen.busy() > 0


def test_a_step_is_what_a_longer_run_has_more(monkeypatch):
    def run(steps):
        done.append(steps)

    def traced(work, device):
        work()
        events = [event("kernel", "prepare", i, 1) for i in range(7)]
        events += [event("kernel", "step", 100 + 10 * i, 4) for i in range(3 * done[-1])]
        events += [event("cuda_runtime", "cudaGraphLaunch", 0, 1)] * done[-1]
        events += [event("cuda_runtime", "cudaStreamSynchronize", 0, 1)] * (2 + 2 * done[-1])
        return Activities.of({"traceEvents": events})

    done = []
    monkeypatch.setattr(gpu_profile, "traced", traced)
    monkeypatch.setattr(gpu_profile, "warned_waits", lambda work: work() or 5 + done[-1])
    profile = gpu_profile.step_profile(run, 20, 10, torch.device("cuda"), True)
    assert done == [20, 30]
    assert (profile.kernels, profile.graphs, profile.waits) == (3, 1, 2)
    assert profile.warned_waits == 1
    assert profile.busy_milliseconds == pytest.approx(3 * 4 / 1e3)
    assert {x.name for x in profile.seen.on_gpu} == {"step"}
    without = gpu_profile.step_profile(run, 20, 10, torch.device("cuda"), False)
    assert (without.warned_waits, without.kernels, without.seen) == (1, None, None)
