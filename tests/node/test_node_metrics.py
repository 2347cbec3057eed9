"""Prometheus can ask a node how it fares, if the node has a port for it."""

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.node.metrics import NodeMetrics, serve_metrics
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import Node
from tests.errors import at


def shown(status):
    registry = CollectorRegistry()
    registry.register(NodeMetrics(status))
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def test_a_node_tells_whether_it_is_online_and_warm_as_it_is_now():
    status = {"starts": 0}
    assert shown(status) == {
        "flwr_distill_node_online": "0.0",
        "flwr_distill_node_ready": "0.0",
        "flwr_distill_node_starts_total": "0.0",
    }
    status |= {"starts": 2, "online": 17}
    assert shown(status) == {
        "flwr_distill_node_online": "1.0",
        "flwr_distill_node_ready": "0.0",
        "flwr_distill_node_starts_total": "2.0",
    }


def test_a_worker_that_was_let_go_leaves_the_node_ready_and_one_that_died_does_not():
    node = Node(load_settings(None, {}))
    warm = [("worker", 7), ("device", "cpu"), ("ready", 7)]
    for report, keys in (
        *((report, None) for report in warm),
        (("released", 7), {"ready"}),
        (("worker", 8), {"ready", "worker"}),
        (("device", "cpu"), {"ready", "worker", "device"}),
        (("worker", 9), {"worker"}),
    ):
        node._note(*report)
        assert keys is None or node._status.keys() - {"pid", "starts"} == keys


def test_a_node_answers_at_the_port_it_is_told():
    (port,) = free_ports(1)
    serve_metrics({"starts": 1}, port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"flwr_distill_node_starts_total 1.0" in answer.read()


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, check=at("metrics-port", value=port)):
            serve_metrics({"starts": 1}, port)
