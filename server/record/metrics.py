"""A run's numbers for Prometheus, read from what the run writes as it goes."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PORT_VARIABLE = "FLWR_DISTILL_METRICS_PORT"
"""Environment variable with the port where a ServerApp answers Prometheus; unset: nowhere."""

_GAUGES = {
    "round": "Rounds done.",
    "accuracy": "Accuracy on the server's test samples, 0 to 1.",
    "loss": "Mean cross-entropy there, in nats.",
    "node_accuracy": "Mean over nodes of the accuracy on what they hold out.",
}


def serve_metrics(folder: Path) -> None:
    """Answer Prometheus about a run until the process ends, if the environment names a port.

    Parameters
    ----------
    folder : Path
        The run's.
    """
    if not (port := os.environ.get(PORT_VARIABLE)):
        return
    registry = CollectorRegistry()
    registry.register(RunMetrics(folder))
    try:
        start_http_server(int(port), registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        log(WARNING, "%s=%s: no metrics: %s", PORT_VARIABLE, port, error)


class RunMetrics(Collector):
    """Rounds, accuracy, bytes by link, and times and nodes of phases.

    Parameters
    ----------
    folder : Path
        The run's, in which ``metrics.jsonl`` and ``journal.jsonl`` grow.
    """

    def __init__(self, folder: Path) -> None:
        self._run = folder.name
        self._rounds = _Tail(folder / "metrics.jsonl")
        self._journal = _Tail(folder / "journal.jsonl")
        self._round: dict[str, Any] = {}
        self._phase: dict[str, Any] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def collect(self) -> Iterable[Metric]:
        """Read what is new, and yield everything."""
        for row in self._rounds.new():
            self._round = row
        for entry in self._journal.new():
            if "phase" in entry:
                self._phase = entry
                self._seconds[entry["phase"]] += entry["seconds"]
        for name, text in _GAUGES.items():
            if self._round.get(name) is not None:
                yield self._gauge(name, text, self._round[name])
        if self._phase:
            yield self._gauge("nodes_asked", "Nodes in the last phase.", self._phase["asked"])
            answered = len(self._phase["nodes"])
            yield self._gauge("nodes_answered", "Nodes that answered in it.", answered)
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
    """Lines of JSON that were added to a file since the last look."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # half written
                self._read += len(line)
                yield json.loads(line)
