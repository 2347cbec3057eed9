"""A FedHEAD leader hands the model out side by side: a deaf member does not hold up the others."""

import threading
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

import flwr_distill.strategies.fedhead.client
from flwr_distill.links import LinkError
from flwr_distill.strategies.fedhead.client import SENT_AT_ONCE, hand_out

DEAF = 3


def test_members_are_sent_to_side_by_side_and_one_that_fails_is_left_out(tmp_path, monkeypatch):
    all_at_once = threading.Barrier(SENT_AT_ONCE)
    deadlines = set()

    def send(session, route, payload, deadline):
        all_at_once.wait(timeout=30)
        deadlines.add(deadline)
        if route["rank"] == DEAF:
            raise LinkError("it does not answer")
        return ConfigRecord({"to": route["rank"]})

    monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "send", send)
    node_config = {"partition-id": 0, "num-partitions": 5, "state-dir": str(tmp_path)}
    context = Context(1, 7, node_config, RecordDict(), {})
    routes = {f"route.{rank}": ConfigRecord({"rank": rank}) for rank in range(SENT_AT_ONCE)}
    arrays = ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})
    message = Message(RecordDict({"arrays": arrays, **routes}), 7, "train.hand_out", ttl=100)
    begin = time.monotonic()
    reply = hand_out(message, context)
    receipts = {key: record["to"] for key, record in reply.content.config_records.items()}
    assert receipts == {f"parcel.{rank}": rank for rank in range(SENT_AT_ONCE) if rank != DEAF}
    (deadline,) = deadlines
    assert begin + 100 <= deadline < begin + 110
