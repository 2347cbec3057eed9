"""How a node fares, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.settings import NodeError


class NodeMetrics(Collector):
    """Whether a node is online and warm, and how often its parts were started.

    Parameters
    ----------
    status : Mapping[str, Any]
        What the node knows of itself (``node.json``); read whenever Prometheus asks.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Yield everything."""
        for name, text in (
            ("online", "1 while the SuperLink admits the node."),
            ("ready", "1 while the process that trains is warm."),
        ):
            yield GaugeMetricFamily(f"flwr_distill_node_{name}", text, value=name in self._status)
        yield CounterMetricFamily(
            "flwr_distill_node_starts",
            "Starts of the node's parts; one if nothing failed.",
            value=self._status["starts"],
        )


def serve_metrics(status: Mapping[str, Any], port: int) -> None:
    """Answer Prometheus until the process ends.

    Raises
    ------
    NodeError
        If the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(NodeMetrics(status))
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise NodeError(f"metrics-port={port}: {error}") from error
