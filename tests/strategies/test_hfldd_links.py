"""What HFLDD's members send reaches their heads, and no one else: by relay and directly."""

from collections import Counter

import pytest
import torch
from flwr.app import ConfigRecord

from flwr_distill.client.session import Session
from flwr_distill.distill import VirtualData
from flwr_distill.distill.packing import unpacked
from flwr_distill.distill.virtual_header import Bounds
from flwr_distill.links.mailbox import Mailbox, start_server
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.links.seal import sealed_size
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.server.grid.ledger import DIRECT, RELAYED
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.client import pooled_samples
from flwr_distill.strategies.hfldd.method import DISTILL, RECEIVE, TRAIN_POOL, VOTE
from flwr_distill.task.datasets import load_dataset
from tests.grids import plain_grid

from .rounds import play, spoil, start

RUN_CONFIG = {"partition.classes": 2, "train.local-epochs": 1}
PER_NODE, SHAPE = 8, (1, 8, 8)


@pytest.fixture
def planted(monkeypatch):
    """Pixels of every member's virtual data, as they are in its parcel."""
    pixels = []

    def distil(images, labels, *, generator, **_):
        levels = torch.randint(256, (PER_NODE, 1, 8, 8), generator=generator, dtype=torch.uint8)
        levels.flatten()[:2] = torch.tensor([0, 255])  # so that quantising changes nothing
        pixels.append(levels.numpy().tobytes())
        return VirtualData(
            images=levels.float() / 16,  # in the range of normalised images, the levels as they are
            labels=labels[:1].expand(PER_NODE).clone(),
            method="planted",
            steps=1,
            seed=0,
            init="noise",
        )

    monkeypatch.setattr("flwr_distill.distill.many.distiller", lambda name: distil)
    return pixels


@pytest.fixture
def mailbox(tmp_path):
    """Address of one mailbox for all nodes of a grid in memory, which share a state directory."""
    server, port = start_server(Mailbox(tmp_path / "state"), "127.0.0.1:0", {})
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


def run(grid, links, **settings):
    """Form the clusters and train the heads once; return the strategy and all that was said."""
    replies = []
    for node_id, node in list(grid.nodes.items()):

        def listening(message, node=node):
            replies.append((message.metadata.message_type, node(message)))
            return replies[-1][1]

        grid.nodes[node_id] = listening
    counting = plain_grid(grid, deadline=60)
    strategy = HFLDD(groups=3, links=links, image_shape=SHAPE, **settings)
    messages = strategy.configure_train(1, start(), ConfigRecord({"lr": 0.05}), counting)
    counting.send_and_receive(messages)
    said = [(m.metadata.message_type, m.content) for m in grid.pushed] + replies
    return strategy, said, counting.ledger


def is_of(message, message_type):
    return message.metadata.message_type == message_type


def config_values(content):
    return [value for record in content.config_records.values() for value in record.values()]


@pytest.mark.parametrize("links", ["relay", "direct"])
@pytest.mark.parametrize("raw", [False, True], ids=["distilled", "raw data"])
def test_the_server_sees_nothing_of_what_members_send(
    client_grid, planted, mailbox, tmp_path, links, raw
):
    grid = client_grid(6, RUN_CONFIG, node_config={"peer-address": mailbox})
    strategy, said, ledger = run(grid, links, share_raw_data=raw, bits=8)
    payloads = [p.read_bytes() for p in (tmp_path / "state").glob("runs/*/*/parcel-*")]
    kept = b"".join(unpacked(payload, 2**20) for payload in payloads)
    if raw:
        by_class = load_dataset("digits").train.images
        patterns = [bytes(image.tobytes()) for image in by_class if bytes(image.tobytes()) in kept]
    else:
        patterns = planted
    assert len(patterns) >= len(strategy.topology.head_of)
    assert all(pattern in kept for pattern in patterns)
    seen = [value for _, content in said for value in config_values(content)]
    texts = b"\n".join(value for value in seen if isinstance(value, bytes))
    assert not any(pattern[:16] in texts for pattern in patterns)
    assert not any(payload[-64:-48] in texts for payload in payloads)  # as it is packed
    bounds = [c["config"] for t, c in said if t == RECEIVE and "images" in c.get("config", {})]
    routes = [c["route"] for t, c in said if t == DISTILL and "route" in c]
    largest = {route["largest"] for route in routes}
    if raw:  # as many as the members said at the first meeting that they have
        held = [r.metric_records["metrics"]["num-examples"] for t, r in said if t == DESCRIBE and r]
        assert {b["images"] for b in bounds} <= set(held)
        assert largest <= {
            sealed_size(Bounds(SHAPE, 10, n, n).num_bytes, VIRTUAL_DATA) for n in held
        }
    else:
        each = {"images": 40, "of-a-class": 40, "formation": 1, "server-round": 1}
        assert [dict(b) for b in bounds] == [each] * len(bounds)
        assert largest == {sealed_size(Bounds(SHAPE, 10, 40, 40).num_bytes, VIRTUAL_DATA)}
    assert len(bounds) == len(set(strategy.topology.head_of.values()))
    member_bytes = ledger.by_phase()[DISTILL]
    assert (DIRECT in member_bytes) == (links == "direct")
    assert (RELAYED in member_bytes) == (links == "relay")


def test_only_receipts_pass_the_server_where_links_are_direct(client_grid, planted, mailbox):
    sizes = {}
    for links in ("relay", "auto"):
        grid = client_grid(6, RUN_CONFIG, node_config={"peer-address": mailbox})
        strategy, _, ledger = run(grid, links)
        members = len(strategy.topology.head_of)
        phases = ledger.by_phase()
        through_server = phases[DISTILL]["node->server"] + phases[RECEIVE]["server->node"]
        sizes[links] = through_server / members
        assert ledger.link_bytes / members > PER_NODE * 64
    assert sizes["relay"] > 2 * PER_NODE * 64
    assert sizes["auto"] < sizes["relay"] - 2 * PER_NODE * 64


def test_heads_hold_the_same_whichever_way_it_came(client_grid, planted, mailbox, monkeypatch):
    pools = {}
    for links, node_config in (
        ("relay", None),
        ("direct", {"peer-address": mailbox}),
        ("auto", {"peer-address": "127.0.0.1:9"}),  # where nobody listens
    ):
        sessions = {}
        session_of = Session.of

        def remembered(context, sessions=sessions, session_of=session_of, **how):
            sessions[context.node_id] = session_of(context, **how)
            return sessions[context.node_id]

        with monkeypatch.context() as patch:
            patch.setattr(Session, "of", remembered)
            grid = client_grid(6, RUN_CONFIG, node_config=node_config)
            strategy, _, _ = run(grid, links)
        pools[links] = [pooled_samples(sessions[head]) for head in strategy.topology.heads]
    for links in ("direct", "auto"):
        for pool, relayed in zip(pools[links], pools["relay"], strict=True):
            assert torch.equal(pool.inputs, relayed.inputs)
            assert torch.equal(pool.labels, relayed.labels)
            assert len(pool) > PER_NODE


def test_a_member_whose_parcel_is_refused_is_left_out_and_the_others_go_on(client_grid, planted):
    rehearsal, _, _ = run(client_grid(6, RUN_CONFIG), "relay")
    members = set(rehearsal.topology.head_of)
    liar = min(members)
    grid = client_grid(6, RUN_CONFIG)

    def change(content):
        sealed = bytearray(content["parcel"]["payload"])
        sealed[100] ^= 1
        content["parcel"]["payload"] = bytes(sealed)

    spoil(grid, liar, change, DISTILL)
    strategy, said, _ = run(grid, "relay")
    assert strategy.topology == rehearsal.topology
    rejected = [
        content["metrics"]["rejected"]
        for kind, content in said
        if kind == RECEIVE and "metrics" in content
    ]
    assert sum(rejected) == 1
    held = [cluster["held"] for cluster in strategy.state_dict()["clusters"]]
    assert {node for by_head in held for nodes in by_head.values() for node in nodes} == (
        members - {liar}
    )


def test_nodes_that_cannot_introduce_themselves_take_no_part(client_grid, planted):
    grid = client_grid(
        6, RUN_CONFIG, lambda index, message: index == 1 and is_of(message, DESCRIBE)
    )
    strategy, _, _ = run(grid, "auto")
    placed = {*strategy.topology.heads, *strategy.topology.head_of}
    assert placed == set(grid.nodes) - {min(grid.nodes) + 1}


def test_a_parcel_is_decoded_once_by_its_head_and_never_by_its_member(client_grid, monkeypatch):
    decoded, read = Counter(), VirtualData.from_safetensors

    def counted(data):
        decoded[data] += 1
        return read(data)

    monkeypatch.setattr(VirtualData, "from_safetensors", counted)
    grid = client_grid(6, RUN_CONFIG)
    how = {"rotate": False, "complete_clusters": False, "votes": True}
    strategy = HFLDD(groups=3, distilled_size=4, distill_steps=1, distiller="dm", **how)
    play(strategy, grid, 2, play(strategy, grid))
    types = {message.metadata.message_type for message in grid.pushed}
    assert {DISTILL, RECEIVE, TRAIN_POOL, VOTE} <= types
    assert len(decoded) == len(strategy.topology.head_of)
    assert set(decoded.values()) == {1}
