"""Heartbeats of a node whose link is limited, over gRPC to a SuperLink's Fleet API."""

import time
from datetime import datetime, timedelta

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.supercore import heartbeat
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.retry import make_simple_grpc_retry_invoker

from flwr_distill.flower.line_1_32.node.connection import BatchingStub
from flwr_distill.flower.steps import LimitedLink
from flwr_distill.node.link import Link, QuietHours

from .superlinks import message_to
from .test_waiting_polls import SuperLink


@pytest.fixture
def superlink():
    superlink = SuperLink()
    (task,) = superlink.state.get_tasks(run_ids=[superlink.run])
    superlink.state.claim_task(task.task_id)
    superlink.state.activate_task(task.task_id)
    yield superlink
    superlink.server.stop(None).wait(5.0)


@pytest.mark.parametrize(
    "link", [Link(16.0), Link(None, QuietHours.parse("17:59-18:00"))], ids=["rate", "quiet"]
)
def test_heartbeats_continue_while_contents_wait(superlink, monkeypatch, link):
    beats = []
    acknowledge = superlink.state.acknowledge_node_heartbeat

    def count(*of):
        beats.append(time.monotonic())
        return acknowledge(*of)

    monkeypatch.setattr(superlink.state, "acknowledge_node_heartbeat", count)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", 5.2)  # and 5 of them a timeout
    start = time.monotonic()
    monkeypatch.setattr(  # one second of the quiet hours is left
        link,
        "_now",
        lambda: datetime(2026, 3, 1, 17, 59, 59) + timedelta(seconds=time.monotonic() - start),
    )
    invoker = make_simple_grpc_retry_invoker()
    with grpc_request_response(
        superlink.server.bound_address, True, invoker, adapter_cls=BatchingStub
    ) as (node, receive, _, _, _, pull_object, *_):
        arrays = [np.full(10**6, value, np.uint8) for value in range(3)]
        message = message_to(node, superlink.run, RecordDict({"load": ArrayRecord(arrays)}))
        superlink.objects.preregister(superlink.run, get_object_tree(message))
        for name, part in get_all_nested_objects(message).items():
            superlink.objects.put(name, part.deflate())
        assert superlink.state.store_message_ins(message)

        def pull_all(pull_object, **_):
            _, tree = receive()
            names = [part.object_id for part in iterate_object_tree(tree)]
            pulled = pull_objects(names, lambda name: pull_object(superlink.run, name))
            return sum(map(len, pulled.values()))

        step = LimitedLink(link)
        start = time.monotonic()
        while not (size := step.pull(pull_all, pull_object=pull_object, get_fab=None)):
            pass
        seconds = time.monotonic() - start
    assert size > 3 * 10**6
    assert seconds >= 1.0  # three megabytes at two a second, of which the last is paid afterwards
    assert len([beat for beat in beats if start <= beat <= start + seconds]) >= 3
