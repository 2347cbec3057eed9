"""What a GPU really did: its kernels, the gaps between them, and waits of the host.

Read from a trace of PyTorch's profiler, which needs NVIDIA's CUPTI. Also measures what starting a
kernel costs.
"""

import json
import statistics
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events; kernels of CUDA graphs are among them, one by one."""
CALLS = ("cuda_runtime", "cuda_driver")
WAITING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
MOST = 10
SYNCHRONISING = "called a synchronizing CUDA operation"
"""PyTorch's warning in its mode for finding waits."""


class Activity(NamedTuple):
    """A kernel or copy; times in microseconds."""

    name: str
    start: float
    duration: float
    is_kernel: bool


@dataclass(frozen=True)
class Activities:
    """What a trace holds.

    Parameters
    ----------
    on_gpu : Sequence[Activity]
        By start.
    calls : Mapping[str, int]
        How often the host called each function of CUDA.
    """

    on_gpu: Sequence[Activity]
    calls: Mapping[str, int]

    @classmethod
    def of(cls, trace: Mapping[str, Any]) -> "Activities":
        """Read a trace in Chrome's format."""
        complete = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        on_gpu = [
            Activity(e["name"], float(e["ts"]), float(e["dur"]), e["cat"] == "kernel")
            for e in complete
            if e.get("cat") in ON_GPU
        ]
        calls = Counter(str(e["name"]) for e in complete if e.get("cat") in CALLS)
        return cls(sorted(on_gpu, key=lambda x: x.start), calls)

    @property
    def kernels(self) -> int:
        """Kernels that ran."""
        return sum(x.is_kernel for x in self.on_gpu)

    @property
    def copies(self) -> int:
        """Copies and fills that ran."""
        return len(self.on_gpu) - self.kernels

    @property
    def waits(self) -> int:
        """Calls in which the host waited."""
        return sum(self.calls.get(name, 0) for name in WAITING)

    @property
    def graphs(self) -> int:
        """CUDA graphs started."""
        return sum(self.calls.get(name, 0) for name in GRAPH_LAUNCHES)

    def last(self, count: int) -> "Activities":
        """The last so many on the GPU, such as those of a few steps after all preparations."""
        return Activities(self.on_gpu[max(0, len(self.on_gpu) - count) :], self.calls)

    def busy(self) -> float:
        """Microseconds in which the GPU did anything; what runs at the same time counts once."""
        covered, until = 0.0, float("-inf")
        for x in self.on_gpu:
            end = x.start + x.duration
            covered += max(0.0, end - max(x.start, until))
            until = max(until, end)
        return covered

    def costliest(self, most: int = MOST) -> list[dict[str, Any]]:
        """Names with the most time in all, most first."""
        times: dict[str, list[float]] = defaultdict(list)
        for x in self.on_gpu:
            times[x.name].append(x.duration)
        total = sum(map(sum, times.values()))
        ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:most]
        return [
            {"name": name, "times": len(t), "microseconds": sum(t), "share": sum(t) / total}
            for name, t in ranked
        ]

    def longest_gaps(self) -> list[dict[str, Any]]:
        """Times in which the GPU did nothing, longest first, with what ran before and after."""
        gaps = []
        latest: Activity | None = None
        for x in self.on_gpu:
            if latest is not None:
                gaps.append((x.start - latest.start - latest.duration, latest.name, x.name))
            if latest is None or x.start + x.duration > latest.start + latest.duration:
                latest = x
        return [
            {"microseconds": length, "after": before, "before": after}
            for length, before, after in sorted(gaps, key=lambda gap: -gap[0])[:MOST]
            if length > 0
        ]


def traced(work: Callable[[], object], device: torch.device) -> Activities:
    """Do some work under the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return Activities.of(json.loads(file.read_text()))


def profiler_error(device: torch.device) -> str | None:
    """Why the profiler sees no kernels here, or None if it does; also its slow first start."""
    try:
        seen = traced(lambda: torch.zeros(8, device=device).add_(1), device)
    except (RuntimeError, AssertionError) as error:
        return f"the profiler failed: {error}"
    return None if seen.kernels else "the profiler saw no kernel: CUPTI is missing or not allowed"


def warned_waits(work: Callable[[], object]) -> int:
    """How often PyTorch says that one of its operations made the host wait."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISING in str(warning.message) for warning in caught)


@dataclass(frozen=True)
class StepProfile:
    """What a step did; `seen` is the end of the longer of two runs, None without the profiler."""

    warned_waits: float
    kernels: float | None = None
    copies: float | None = None
    graphs: float | None = None
    waits: float | None = None
    busy_milliseconds: float | None = None
    seen: Activities | None = None


def step_profile(
    run: Callable[[int], object], first: int, more: int, device: torch.device, profiler: bool
) -> StepProfile:
    """Compare runs of `first` steps and of `more` in addition."""
    waits: list[int] = []

    def watched(steps: int) -> Activities | None:
        def work() -> None:
            waits.append(warned_waits(lambda: run(steps)))

        if profiler:
            return traced(work, device)
        work()
        return None

    few, many = watched(first), watched(first + more)
    warned = (waits[1] - waits[0]) / more
    if few is None or many is None:
        return StepProfile(warned)
    seen = many.last(len(many.on_gpu) - len(few.on_gpu))
    return StepProfile(
        warned_waits=warned,
        kernels=(many.kernels - few.kernels) / more,
        copies=(many.copies - few.copies) / more,
        graphs=(many.graphs - few.graphs) / more,
        waits=(many.waits - few.waits) / more,
        busy_milliseconds=seen.busy() / more / 1e3,
        seen=seen,
    )


class LaunchCosts(NamedTuple):
    """Microseconds of a kernel that does next to nothing and needs the one before it.

    Parameters
    ----------
    in_graph : float
        Of each kernel in a CUDA graph.
    graph : float
        Of a graph, whatever is in it.
    eager : float
        Of each kernel that Python starts through PyTorch.
    """

    in_graph: float
    graph: float
    eager: float


def launch_costs(device: torch.device) -> LaunchCosts:
    """Measure what launches cost on this GPU and this host."""
    few, many = 100, 1000
    number = torch.zeros(8, device=device)

    def work(kernels: int) -> None:
        for _ in range(kernels):
            number.add_(1)

    def timed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            work()
            torch.cuda.synchronize(device)
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    work(few)
    graphs = []
    for kernels in (few, many):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            work(kernels)
        graph.replay()
        graphs.append(timed(graph.replay))
    in_graph = (graphs[1] - graphs[0]) / (many - few)
    eager = (timed(lambda: work(many)) - timed(lambda: work(few))) / (many - few)
    return LaunchCosts(in_graph, graphs[0] - few * in_graph, eager)
