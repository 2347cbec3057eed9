"""`flwr-distill edge` at its command line."""

import pytest

import flwr_distill.fleet.edge
from flwr_distill.fleet.edge_runs import FIXED, below_config
from flwr_distill.fleet.servers import Addresses
from flwr_distill.server.settings import RunSettings, default_settings

from .commands import assert_refused, command


@pytest.fixture
def started(monkeypatch):
    """Edges that were started, none of which runs: node, state directory and what is below."""
    findings = []

    class Recorded:
        def __init__(self, *arguments):
            findings.append(arguments)

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(flwr_distill.fleet.edge, "Edge", Recorded)
    return findings


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("edge", *arguments)


def test_what_is_above_goes_to_the_node_and_what_is_below_to_the_runs(started, invoke, tmp_path):
    result = invoke(
        *("--insecure", "--superlink", "far:9092", "--name", "north", "--policy", "hospital"),
        *("--below-insecure", "--below-address", "0.0.0.0:7000", "--strategy", "fedhead"),
        *("--min-nodes", "20", "-c", "most-samples=0.0"),
    )
    assert result.exit_code == 0, result.output
    (node, state_dir, below, _), *others = started
    assert not others
    assert node["superlink"] == "far:9092"
    assert node["name"] == "north"
    assert node["policy"] == "hospital"
    assert state_dir == tmp_path / "state" / "edge"
    assert below.run_config == {"strategy": "fedhead", "min-nodes": 20, "most-samples": 0.0}
    assert below.certificate is None
    assert below.addresses == Addresses.beside("0.0.0.0:7000", 7001, 7002)


def test_nothing_goes_without_tls_unless_it_is_said(started, invoke):
    assert_refused(invoke("--insecure"), "below-certificates: certs/server/ca.crt does not exist")
    assert not started


@pytest.mark.parametrize("option", ["--data", "--partition-id", "--peer-address", "--sector"])
def test_an_edge_has_no_data_and_no_address_among_nodes(invoke, option):
    assert invoke("--below-insecure", option, "1").exit_code == 2  # there is no such option


def test_data_in_the_file_are_refused(invoke, started, tmp_path):
    (tmp_path / "node.yaml").write_text("insecure: true\ndataset: usps\n")
    assert_refused(invoke("--below-insecure", "--config", "node.yaml"), "usps")
    assert not started


@pytest.mark.parametrize("key", FIXED)
def test_what_follows_from_the_run_above_cannot_be_set(invoke, started, key):
    default = default_settings()[key]
    value = f'"{default}"' if isinstance(default, str) else default
    assert_refused(
        invoke("--insecure", "--below-insecure", "-c", f"{key}={value}"),
        f"run-config: {key}: follows from the run above",
    )
    assert not started


def test_a_wrong_setting_below_is_said_at_once(invoke, started):
    assert_refused(invoke("--insecure", "--below-insecure", "-c", "mini-nodes=3"), "mini-nodes")
    assert not started


def test_a_run_below_has_the_task_and_rounds_of_the_run_above_and_all_else_of_its_edge():
    above = {
        **{"strategy": "krum", "min-nodes": 10, "num-rounds": 7, "phase-timeout": 100.0},
        **{"dataset": "usps", "seed": 5, "fraction-evaluate": 0.2, "data-root": "/above"},
        **{"train.lr": 0.3, "fraction-train": 0.5, "aggregator": "fedmedian", "quorum": 1.0},
    }
    own = {"strategy": "fedhead", "min-nodes": 20, "data-root": "/below"}
    settings = RunSettings.from_run_config(below_config(above, own))
    assert (settings.dataset, settings.seed, settings.train.lr) == ("usps", 5, 0.3)
    assert (settings.num_rounds, settings.phase_timeout) == (7, 75.0)
    assert (settings.strategy, settings.min_nodes, settings.data_root) == ("fedhead", 20, "/below")
    assert (settings.fraction_train, settings.aggregator, settings.quorum) == (1.0, "", 0.0)
    assert settings.fraction_evaluate == 1.0
    assert settings.fedhead.sectors == 1
    assert settings.patience_failed > settings.num_rounds
