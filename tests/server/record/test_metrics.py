"""Prometheus reads of a run what the run itself wrote."""

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flwr_distill.base.files import replacing
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.server.record.metrics import PORT_VARIABLE, RunMetrics, serve_metrics


def row(number, **more):
    numbers = {"accuracy": 0.5, "loss": 1.5, "server_bytes": 100 * number, "link_bytes": 7}
    return json.dumps({"round": number, "node_accuracy": None, **numbers, **more}) + "\n"


def phase(name, seconds, asked=4, answered=4):
    nodes = {str(node): {} for node in range(answered)}
    return json.dumps({"phase": name, "seconds": seconds, "asked": asked, "nodes": nodes}) + "\n"


def samples(text):
    """Samples as {name: value} or {(name, label): value}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "17"
            found[(sample.name, *labels.values())] = sample.value
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "17").mkdir()
    return tmp_path / "17"


@pytest.fixture
def scrape(folder):
    registry = CollectorRegistry()
    registry.register(RunMetrics(folder))
    return lambda: samples(generate_latest(registry).decode())


def append(file, text):
    with file.open("a") as opened:
        opened.write(text)


def test_a_run_that_has_written_nothing_yet_has_no_numbers(scrape):
    assert scrape() == {}


def test_files_that_are_replaced_are_read_from_their_beginning(folder, scrape):
    """As those of a resumed run, and an edge's rows once its nodes have evaluated."""
    files = {"metrics.jsonl": row(0) + row(1) + row(2), "journal.jsonl": phase("train", 1.5) * 2}
    for name, text in files.items():
        append(folder / name, text)
    assert scrape()["flwr_distill_phase_seconds_total", "train"] == 3
    for name, text in files.items():
        with replacing(folder / name) as partial:
            partial.write_text(text.splitlines()[0] + "\n")
    append(folder / "metrics.jsonl", row(1, accuracy=0.625))
    numbers = scrape()
    assert numbers["flwr_distill_accuracy",] == 0.625
    assert numbers["flwr_distill_phase_seconds_total", "train"] == 1.5


def test_every_scrape_tells_the_latest_round_and_the_sums_of_all_phases(folder, scrape):
    append(folder / "metrics.jsonl", row(0) + row(1, accuracy=0.75))
    append(folder / "journal.jsonl", phase("train", 1.5) + '{"warning": "x"}\n' + phase("train", 2))
    assert scrape() == {
        ("flwr_distill_round",): 1,
        ("flwr_distill_accuracy",): 0.75,
        ("flwr_distill_loss",): 1.5,
        ("flwr_distill_nodes_asked",): 4,
        ("flwr_distill_nodes_answered",): 4,
        ("flwr_distill_bytes_total", "server"): 100,
        ("flwr_distill_bytes_total", "node to node"): 7,
        ("flwr_distill_phase_seconds_total", "train"): 3.5,
    }
    append(folder / "metrics.jsonl", row(2, node_accuracy=0.5))
    append(folder / "journal.jsonl", phase("evaluate", 4, asked=3, answered=2))
    later = scrape()
    assert later["flwr_distill_round",] == 2
    assert later["flwr_distill_node_accuracy",] == 0.5
    assert later["flwr_distill_phase_seconds_total", "train"] == 3.5
    assert later["flwr_distill_phase_seconds_total", "evaluate"] == 4
    assert (later["flwr_distill_nodes_asked",], later["flwr_distill_nodes_answered",]) == (3, 2)


def test_a_server_without_test_samples_has_no_accuracy(folder, scrape):
    append(folder / "metrics.jsonl", row(1, accuracy=None, loss=None))
    assert not {("flwr_distill_accuracy",), ("flwr_distill_loss",)} & scrape().keys()


def test_a_line_that_is_half_written_counts_once_it_is_whole(folder, scrape):
    line = phase("train", 2)
    append(folder / "journal.jsonl", line[:10])
    assert scrape() == {}
    append(folder / "journal.jsonl", line[10:])
    assert scrape()["flwr_distill_phase_seconds_total", "train"] == 2
    assert scrape()["flwr_distill_phase_seconds_total", "train"] == 2


def test_metrics_are_served_only_where_the_environment_names_a_port(folder, monkeypatch):
    (port,) = free_ports(1)
    append(folder / "metrics.jsonl", row(3))
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    serve_metrics(folder)
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    serve_metrics(folder)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert samples(answer.read().decode())["flwr_distill_round",] == 3


@pytest.mark.parametrize("port", ["taken", "99999"])
def test_a_port_that_cannot_be_had_costs_a_warning_and_not_the_run(
    folder, monkeypatch, caplog, port
):
    (free,) = free_ports(1)
    monkeypatch.setenv(PORT_VARIABLE, str(free))
    serve_metrics(folder)
    monkeypatch.setenv(PORT_VARIABLE, str(free) if port == "taken" else port)
    with caplog.at_level("WARNING", logger="flwr"):
        serve_metrics(folder)
    assert "no metrics" in caplog.text
