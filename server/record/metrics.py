"""Serves a run's metrics to Prometheus, read from the files that the run writes."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from logging import WARNING
from pathlib import Path
from typing import Any, BinaryIO

from flwr.common import log
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PORT_VARIABLE = "FLWR_DISTILL_METRICS_PORT"
"""Environment variable with the port for Prometheus; if unset, metrics are not served."""

_GAUGES = {
    "round": "Finished rounds.",
    "accuracy": "Accuracy on the server's test samples, 0 to 1.",
    "loss": "Mean cross-entropy there, in nats.",
    "balanced_accuracy": "Mean over classes of the accuracy there.",
    "macro_f1": "Mean over classes of F1 there.",
    "auroc": "Mean over classes of the area under the ROC curve, one against rest, there.",
    "ece": "Expected calibration error there.",
    "node_accuracy": "Mean over nodes of the accuracy on their held-out samples.",
}


def serve_metrics(folder: Path) -> None:
    """Serve a run's metrics until the process ends, if the environment names a port."""
    if not (port := os.environ.get(PORT_VARIABLE)):
        return
    registry = CollectorRegistry()
    registry.register(RunMetrics(folder))
    try:
        start_http_server(int(port), registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        log(WARNING, "%s=%s: no metrics: %s", PORT_VARIABLE, port, error)


class RunMetrics(Collector):
    """Rounds, accuracy, bytes by link, and durations and nodes of phases."""

    def __init__(self, folder: Path) -> None:
        self._run = folder.name
        self._rounds = _Tail(folder / "metrics.jsonl")
        self._journal = _Tail(folder / "journal.jsonl")
        self._round: dict[str, Any] = {}
        self._phase: dict[str, Any] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def collect(self) -> Iterable[Metric]:
        """Read new lines, and yield all metrics."""
        for row in self._rounds.new():
            self._round = row
        entries = self._journal.new()
        if self._journal.restarted:
            self._phase = {}
            self._seconds.clear()
        for entry in entries:
            if "phase" in entry:
                self._phase = entry
                self._seconds[entry["phase"]] += entry["seconds"]
        for name, text in _GAUGES.items():
            if self._round.get(name) is not None:
                yield self._gauge(name, text, self._round[name])
        if self._phase:
            num_replies = len(self._phase["nodes"])
            yield self._gauge("nodes_asked", "Nodes in the last phase.", self._phase["asked"])
            yield self._gauge("nodes_answered", "Nodes that replied in it.", num_replies)
        links = {"server": "server_bytes", "node to node": "link_bytes"}
        sizes = {link: self._round[key] for link, key in links.items() if self._round}
        yield self._counter("bytes", "Bytes of records, by link.", "link", sizes)
        yield self._counter("phase_seconds", "Time by phase.", "phase", self._seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"flwr_distill_{name}", text, labels=["run"])
        gauge.add_metric([self._run], value)
        return gauge

    def _counter(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        counter = CounterMetricFamily(f"flwr_distill_{name}", text, labels=["run", label])
        for key, value in values.items():
            counter.add_metric([self._run, key], value)
        return counter


class _Tail:
    """JSON lines added to a file since the last read; of one that took its place, all."""

    def __init__(self, path: Path) -> None:
        self.restarted = False
        """Whether the last read was of another file than the one before."""
        self._path = path
        self._file: BinaryIO | None = None  # open, so that no other file gets its inode

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        self.restarted = self._file is not None and not _is(self._path, self._file)
        if self._file is not None and self.restarted:
            self._file.close()
        if self._file is None or self.restarted:
            self._file = self._path.open("rb")
        start = self._file.tell()
        whole, end, _ = self._file.read().rpartition(b"\n")  # the last one may be incomplete
        self._file.seek(start + len(whole + end))
        return [json.loads(line) for line in whole.splitlines()]


def _is(path: Path, file: BinaryIO) -> bool:
    return os.path.samestat(path.stat(), os.fstat(file.fileno()))
