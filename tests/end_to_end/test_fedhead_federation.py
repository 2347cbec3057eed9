"""FedHEAD over direct links, on a federation of real processes."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from flwr_distill.fleet.local_federation import LocalFederation

ROOT = Path(__file__).resolve().parents[2]
NODES, SECTORS = 4, 2


@pytest.fixture(scope="module")
def outcome_and_folder(tmp_path_factory):
    """A run of one round, and its results."""
    folder = tmp_path_factory.mktemp("federation")
    settings = {
        "strategy": "fedhead",
        "links": "direct",
        "num-rounds": 1,
        "min-nodes": NODES,
        "train.local-epochs": 1,
        "fedhead.sectors": SECTORS,
        "fedhead.distill-epochs": 1,
        "fedhead.least-classes": 0.0,
        "fedhead.least-gain": 0.0,
        "runs-dir": str(folder / "runs"),
        "phase-timeout": 120.0,
    }
    with LocalFederation(NODES, folder / "state", direct_links=True) as federation:
        outcome = federation.run(ROOT, settings, timeout=240)
    return outcome, folder / "runs" / str(outcome.run_id)


@pytest.mark.slow
def test_a_round_runs_to_its_end_and_leaves_its_leaders(outcome_and_folder):
    outcome, folder = outcome_and_folder
    assert outcome.completed, outcome.lines[-20:]
    topology = json.loads((folder / "topology.json").read_text())
    assert topology["heads"] == {"1": [cluster["head"] for cluster in topology["clusters"]]}
    assert len(topology["clusters"]) == SECTORS
    assert (folder / "topology.png").exists()


@pytest.mark.slow
def test_models_pass_the_server_to_and_from_leaders_only(outcome_and_folder):
    _, folder = outcome_and_folder
    traffic = json.loads((folder / "traffic.json").read_text())
    model = sum(array.nbytes for array in load_file(folder / "model.safetensors").values())
    by_phase = {
        (phase, link): size
        for phase, links in traffic["payloads"].items()
        for link, size in links.items()
        if size
    }
    assert by_phase.keys() == {
        ("train.hand_out", "server->node"),
        ("train.aggregate_sector", "node->server"),
        ("train.distill_sector", "server->node"),
        ("train.distill_sector", "node->server"),
    }
    for size in by_phase.values():
        assert size == pytest.approx(SECTORS * model, rel=0.03)
    transfers = 2 * (NODES - SECTORS)  # w to the members, what they trained to their leaders
    direct = sum(links.get("member->head, direct", 0) for links in traffic["measured"].values())
    assert direct == pytest.approx(transfers * model, rel=0.03)
    assert not any("member->head, relayed" in links for links in traffic["measured"].values())
