"""Real nodes send to each other, and a mailbox lives and dies with its node."""

import os
import signal

import pytest

from flwr_distill.fleet.local_federation import LocalFederation
from tests.waiting import node_status, wait_until


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    settings = {"preload": []}
    with LocalFederation(2, folder, node_settings=settings, direct_links=True) as running:
        yield running


def outcome(run):
    assert run.completed, "\n".join(run.lines)
    return [line.split()[1:] for line in run.lines if line.startswith("OUTCOME")]


@pytest.mark.deployment("direct and relayed links")
@pytest.mark.slow
@pytest.mark.parametrize(("links", "taken"), [("auto", "direct"), ("relay", "relay")])
def test_real_nodes_send_to_each_other(federation, sending_app, links, taken):
    assert outcome(federation.run(sending_app, {"links": links}, timeout=120)) == [[taken, "1"]]


@pytest.mark.slow
def test_a_mailbox_that_is_killed_is_started_again_with_its_node(federation, sending_app):
    before = [node_status(node.state_dir) for node in federation.nodes]
    for earlier in before:
        os.kill(earlier["mailbox"], signal.SIGKILL)
    for node, earlier in zip(federation.nodes, before, strict=True):

        def is_back(node=node, earlier=earlier):
            now = node_status(node.state_dir)
            restarted = now.get("mailbox") not in (None, earlier["mailbox"])
            return restarted and {"ready", "online"} <= now.keys()

        wait_until(is_back, 100)
    federation.wait_for_nodes(timeout=60)
    assert outcome(federation.run(sending_app, {"links": "direct"}, timeout=120)) == [
        ["direct", "1"]
    ]
