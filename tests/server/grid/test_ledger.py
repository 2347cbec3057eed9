"""The book of bytes, apart from the grid that writes it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_distill.server.grid.ledger import (
    DIRECT,
    DOWN,
    RELAYED,
    UP,
    Ledger,
    content_bytes,
    payload_bytes,
)


@pytest.mark.parametrize(
    "values",
    [
        {"a": True, "bc": 3, "d": 0.5},
        {"name": "text", "key": b"bytes"},
        {"flags": [True, False], "numbers": [1, 2, 3], "shares": [0.5]},
        {"words": ["a", "bcd"], "keys": [b"", b"12"]},
    ],
)
def test_a_config_is_counted_as_flower_counts_it(values):
    record = ConfigRecord(values)
    assert content_bytes(RecordDict({"config": record})) == record.count_bytes()


def test_every_node_that_gets_a_record_counts_whether_they_share_it_or_not():
    weights = ArrayRecord([np.zeros(50)])
    shared, own = RecordDict({"arrays": weights}), RecordDict({"arrays": weights})
    ledger = Ledger()
    ledger.book_sent([Message(shared, 1, "train"), Message(shared, 2, "train")])
    ledger.book_sent([Message(own, 3, "train")])
    assert ledger.by_phase() == {"train": {DOWN: 3 * weights.count_bytes()}}
    assert ledger.payloads_by_phase() == ledger.by_phase()


def test_payloads_are_arrays_and_what_is_sealed_and_no_metrics():
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.zeros(4)]),
            "metrics": MetricRecord({"x": 1.0}),
            "parcel.1": ConfigRecord({"payload": bytes(7)}),
            "parcel.2": ConfigRecord({"payload": bytes(5), "token": "t"}),
            "config": ConfigRecord({"payload": "no bytes"}),
        }
    )
    assert payload_bytes(content) == content["arrays"].count_bytes() + 12


def test_what_was_booked_before_is_added_to_what_is_booked_since():
    ledger = Ledger()
    message = Message(RecordDict({"arrays": ArrayRecord([np.zeros(4)])}), 1, "train")
    ledger.book_sent([message])
    once = ledger.server_bytes
    before = {"entries": {"train": {DOWN: 5, UP: 3}, "evaluate": {DOWN: 2}}, "payloads": {}}
    for _ in range(2):
        ledger.load_state_dict(before)
    assert ledger.by_phase() == {"train": {DOWN: once + 10, UP: 6}, "evaluate": {DOWN: 4}}
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.state_dict() == ledger.state_dict()


def test_links_between_nodes_are_relayed_and_direct_ones_and_none_of_the_servers():
    ledger = Ledger()
    links = {DOWN: 1, UP: 20, RELAYED: 300, DIRECT: 4000}
    ledger.load_state_dict({"entries": {"train": links, "x": links}, "payloads": {}})
    assert (ledger.server_bytes, ledger.link_bytes) == (42, 8600)
