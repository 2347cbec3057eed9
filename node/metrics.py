"""Metrics of a node for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flwr_distill.node.settings import NodeError


class NodeMetrics(Collector):
    """A node's status (the content of ``node.json``), read at every scrape."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        for name, text in (
            ("online", "1 while the SuperLink admits the node."),
            ("ready", "1 while the node can work: its worker is warm, or rests."),
        ):
            yield GaugeMetricFamily(f"flwr_distill_node_{name}", text, value=name in self._status)
        yield CounterMetricFamily(
            "flwr_distill_node_starts",
            "Starts of the node's parts; 1 if nothing failed.",
            value=self._status["starts"],
        )


def serve_metrics(status: Mapping[str, Any], port: int) -> None:
    """Serve metrics until the process ends; `NodeError` if the port is in use."""
    registry = CollectorRegistry()
    registry.register(NodeMetrics(status))
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise NodeError(str(error), where="metrics-port", value=port) from error
