"""Runs whose nodes send each other coded models: fewer bytes, and the same model however sent."""

import json
from collections import Counter

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.links.mailbox import Mailbox, start_server
from flwr_distill.node.policy import Policy
from flwr_distill.protocol.parcels import from_payload, read_payload
from flwr_distill.simulation.run import on_devices, simulate
from flwr_distill.strategies.fedhead import client as fedhead_client

from .test_runs import NODE, NODES, TASK, models_of

pytestmark = pytest.mark.slow

FEDHEAD = {"strategy": "fedhead", "links": "relay", "fedhead.sectors": 2, "fedhead.least-gain": 0.0}
RING = {"strategy": "fedseq", "links": "relay"}
CODED = {"down-codec": "float16", "up-codec": "int8"}
SMALL = {"down-codec": "delta-int4", "up-codec": "int4"}


@pytest.fixture
def run(tmp_path, little_distillation):
    """Runs in this process, in a folder of its own; gives the run's folder."""

    def run(folder, nodes=NODES, address="", **config):
        node = {**NODE, "num-partitions": nodes, **({"peer-address": address} if address else {})}
        config = {**TASK, **little_distillation, **config}
        run_in_process(config, [node] * nodes, tmp_path / folder)
        return tmp_path / folder / "1"

    return run


def last_row(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_models_between_nodes_take_a_fraction_and_a_sector_learns_as_much(run):
    config = {
        **FEDHEAD,
        **{"num-rounds": 12, "partition.classes": 5, "fedhead.least-gain": 0.1},
        **{"train.local-epochs": 2, "train.batch-size": 32, "train.lr": 0.05},
    }
    plain = last_row(run("plain", nodes=8, **config))
    small = last_row(run("small", nodes=8, **config, **SMALL))
    assert small["link_bytes"] < 0.13 * plain["link_bytes"]
    assert small["server_bytes"] < 0.15 * plain["server_bytes"]
    assert plain["accuracy"] > 0.6
    assert small["accuracy"] > plain["accuracy"] - 0.01
    assert small["set_aside"] == plain["set_aside"] == 0


SHORT_STEPS = {"num-rounds": 3, "partition.scheme": "iid", "train.lr": 0.005}
"""Updates that are shorter than what a model loses on its way to nodes."""


def test_short_updates_of_a_coded_model_are_no_lies_of_leaders(run):
    """Leaders that the server takes for liars lead no more, and the run ends."""
    assert (
        last_row(run("run", **FEDHEAD, **SHORT_STEPS, **{"down-codec": "bfloat16"}))["round"] == 3
    )


def test_nor_are_those_of_a_model_that_leaders_coded_again(run, tmp_path):
    server, port = start_server(Mailbox(tmp_path / "run" / "nodes"), "127.0.0.1:0", {})
    config = {**FEDHEAD, **SHORT_STEPS, "links": "direct", "down-codec": "delta-int4"}
    try:
        folder = run("run", address=f"127.0.0.1:{port}", **config)
    finally:
        server.stop(grace=None).wait()
    assert last_row(folder)["set_aside"] == 0


@pytest.mark.parametrize("config", [FEDHEAD, RING], ids=["sectors", "ring"])
def test_relayed_and_direct_parcels_give_the_same_model_to_the_last_bit(config, run, tmp_path):
    relayed = run("relayed", **config, **CODED)
    server, port = start_server(Mailbox(tmp_path / "direct" / "nodes"), "127.0.0.1:0", {})
    try:
        address = f"127.0.0.1:{port}"
        direct = run("direct", address=address, **{**config, **CODED, "links": "direct"})
    finally:
        server.stop(grace=None).wait()
    assert models_of(direct) == models_of(relayed)
    traffic = json.loads((direct / "traffic.json").read_text())
    links = {link for links in traffic["measured"].values() for link in links}
    assert "member->head, direct" in links
    assert "member->head, relayed" not in links


@pytest.mark.parametrize("config", [FEDHEAD, RING], ids=["sectors", "ring"])
@pytest.mark.parametrize("codecs", [CODED, SMALL], ids=["int8", "int4"])
def test_a_resumed_run_ends_with_the_same_model(config, codecs, run):
    whole = run("whole", **config, **codecs, **{"num-rounds": 3})
    run("parts", **config, **codecs, **{"num-rounds": 1})
    parts = run("parts", **config, **codecs, **{"num-rounds": 3}, resume="latest")
    assert models_of(parts) == models_of(whole)


@pytest.mark.parametrize("strategy", ["fedhead", "fedseq", "fedseq-zaccone"])
def test_a_ring_s_and_a_sector_s_parcels_are_coded(strategy, run):
    plain, coded = (
        last_row(run(name, strategy=strategy, links="relay", **codecs))
        for name, codecs in (("plain", {}), ("coded", CODED))
    )
    assert coded["link_bytes"] < 0.5 * plain["link_bytes"]
    assert coded["set_aside"] == 0


def test_exact_codecs_leave_parcels_as_they_were(run):
    one, other = (
        run(name, **FEDHEAD, **codecs)
        for name, codecs in (("default", {}), ("exact", {"down-codec": "delta-int8"}))
    )
    assert last_row(one)["link_bytes"] == last_row(other)["link_bytes"]


@pytest.mark.parametrize("config", [FEDHEAD, RING], ids=["sectors", "ring"])
def test_nodes_whose_policy_judges_models_let_coded_ones_leave(config, tmp_path, monkeypatch):
    judged = Counter()

    def reading(content, most):
        record, codec = read_payload(content, most)
        judged[codec] += 1
        return record, codec

    monkeypatch.setattr("flwr_distill.node.parcels.read_payload", reading)
    policy = Policy(replies="declared", settings="listed", direct_links=False)
    nodes = on_devices([NODE] * NODES, "cpu")
    config = {**TASK, **config, **CODED}
    folder = simulate(config, nodes, tmp_path, workers=1, policy=policy)
    assert last_row(folder)["set_aside"] == 0
    assert judged.keys() == ({"delta-int8"} if config["strategy"] == "fedhead" else {"float16"})
    monkeypatch.undo()
    free = simulate(config, nodes, tmp_path / "free", workers=1)
    assert models_of(free) == models_of(folder)


def test_a_new_leader_gets_the_bytes_that_the_first_one_got(run, monkeypatch):
    """Members send again what they reported the norm of: other bytes would make liars of them."""
    sent, failed = [], []
    send = fedhead_client.send

    def noting(session, route, payload, deadline):
        if route["purpose"] == "sector-model":
            sent.append((session.node_id, payload))
        return send(session, route, payload, deadline)

    def failing(session, content):
        if not failed:
            failed.append(session.node_id)
            raise ValueError("this leader fails")
        return mean_of_sector(session, content)

    mean_of_sector = fedhead_client.mean_of_sector
    monkeypatch.setattr(fedhead_client, "send", noting)
    monkeypatch.setattr(fedhead_client, "mean_of_sector", failing)
    config = {**FEDHEAD, "fedhead.sectors": 1, "num-rounds": 1, **CODED}
    folder = run("failing", **config)
    assert last_row(folder)["set_aside"] == 0
    by_node = {node: {payload for n, payload in sent if n == node} for node, _ in sent}
    assert all(len(payloads) == 1 for payloads in by_node.values())
    assert max(Counter(node for node, _ in sent).values()) == 2
    payload = sent[0][1]
    with pytest.raises(ValueError, match="difference"):
        from_payload(payload, 2**20)
