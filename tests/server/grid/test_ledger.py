"""The bytes of a run, as the grid counts them."""

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
from tests.grids import messages_to, plain_grid

WEIGHTS = ArrayRecord([np.zeros(100, dtype=np.float32)])


def counted(memory_grid, answer, messages):
    """The ledger of a phase in which all nodes answer so."""
    nodes = {message.metadata.dst_node_id: lambda _: answer for message in messages}
    grid = plain_grid(memory_grid(nodes), deadline=5)
    grid.send_and_receive(messages)
    return grid.ledger


def test_the_bytes_of_all_records_count_by_phase_and_link(memory_grid):
    messages = messages_to([1, 2, 3], arrays=WEIGHTS, config=ConfigRecord({"lr": 0.1, "name": ""}))
    ledger = counted(memory_grid, RecordDict({"arrays": WEIGHTS}), messages)
    arrays, config = WEIGHTS.count_bytes(), len("lr") + 8 + len("name")
    assert arrays >= 400
    assert ledger.by_phase() == {"train": {DOWN: 3 * (arrays + config), UP: 3 * arrays}}
    assert ledger.server_bytes == 3 * (2 * arrays + config)


def test_arrays_and_parcels_are_told_from_the_control_messages_around_them(memory_grid):
    records = {
        "arrays": WEIGHTS,
        "config": ConfigRecord({"lr": 0.1, "key": b"\x01" * 32}),
        "delivery.1": ConfigRecord({"payload": bytes(1000), "peer-key": bytes(32)}),
    }
    receipt = RecordDict({"parcel": ConfigRecord({"link": "direct", "num-bytes": 1000})})
    messages = messages_to([1], "train.aggregate_sector", **records)
    payloads = counted(memory_grid, receipt, messages).payloads_by_phase()
    assert payloads["train.aggregate_sector"] == {DOWN: WEIGHTS.count_bytes() + 1000, UP: 0}


def test_a_members_parcel_counts_on_the_link_to_its_head_too(memory_grid):
    parcel = RecordDict({"parcel": ConfigRecord({"payload": bytes(1000)})})
    ledger = counted(memory_grid, parcel, messages_to([1], "train.distill"))
    assert ledger.by_phase()["train.distill"][RELAYED] == len("payload") + 1000
    assert ledger.link_bytes == len("payload") + 1000


@pytest.mark.parametrize(("claim", "booked"), [(1000, 1000), (0, 0), (-1, 0), (-(2**62), 0)])
def test_a_receipt_of_less_than_nothing_lowers_no_book(claim, booked):
    ledger = Ledger()
    (message,) = messages_to([1], "train.distill")
    for size in (5000, claim):
        receipt = ConfigRecord({"link": "direct", "num-bytes": size})
        ledger.book_parcels(Message(RecordDict({"parcel": receipt}), reply_to=message))
    assert ledger.by_phase()["train.distill"] == {DIRECT: 5000 + booked}
    assert ledger.link_bytes == 5000 + booked


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
    ledger = Ledger()
    ledger.book_sent(messages_to([1, 2], arrays=WEIGHTS))
    ledger.book_sent(messages_to([3], arrays=WEIGHTS))
    assert ledger.by_phase() == {"train": {DOWN: 3 * WEIGHTS.count_bytes()}}
    assert ledger.payloads_by_phase() == ledger.by_phase()


def test_payloads_are_arrays_and_what_is_sealed_and_no_metrics():
    content = RecordDict(
        {
            "arrays": WEIGHTS,
            "metrics": MetricRecord({"x": 1.0}),
            "parcel.1": ConfigRecord({"payload": bytes(7)}),
            "parcel.2": ConfigRecord({"payload": bytes(5), "token": "t"}),
            "config": ConfigRecord({"payload": "no bytes"}),
        }
    )
    assert payload_bytes(content) == WEIGHTS.count_bytes() + 12


def test_what_was_booked_before_is_added_to_what_is_booked_since():
    ledger = Ledger()
    ledger.book_sent(messages_to([1], arrays=WEIGHTS))
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
