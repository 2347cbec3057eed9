"""Real nodes send to each other, and a mailbox lives and dies with its node."""

import json
import os
import signal
import time

import pytest

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.supervisor import status_file


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    settings = {"preload": []}
    with LocalFederation(2, folder, node_settings=settings, direct_links=True) as running:
        yield running


def status(federation, index):
    return json.loads(status_file(federation.nodes[index].state_dir).read_text())


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
    before = [status(federation, index) for index in range(2)]
    for told in before:
        os.kill(told["mailbox"], signal.SIGKILL)
    deadline = time.monotonic() + 100
    for index, told in enumerate(before):
        while (now := status(federation, index)).get("mailbox") in (None, told["mailbox"]) or (
            "ready" not in now or "online" not in now
        ):
            assert time.monotonic() < deadline, now
            time.sleep(0.2)
    federation.wait_for_nodes(timeout=60)
    assert outcome(federation.run(sending_app, {"links": "direct"}, timeout=120)) == [
        ["direct", "1"]
    ]
