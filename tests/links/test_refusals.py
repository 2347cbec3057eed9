"""What a receiver refuses, it rejects with a line in its log, whichever way it came."""

from types import SimpleNamespace

import pytest
import torch

from flwr_distill.distill import VirtualData
from flwr_distill.links import send
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.strategies.hfldd.client import keep_parcel
from flwr_distill.strategies.hfldd.method import ParcelBounds
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.settings import TaskSettings

from .conftest import RECEIVER, SENDER, STRANGER

PAYLOAD = VirtualData(
    images=torch.rand(3, 1, 8, 8),
    labels=torch.tensor([0, 1, 2]),
    method="test",
    steps=1,
    seed=0,
    init="noise",
).to_bytes()


@pytest.fixture(params=["relay", "direct"])
def parcels(request, party, listening, links_of):
    """What two nodes and the server do with parcels, over one kind of link."""
    sender, receiver, other = party(SENDER), listening(RECEIVER), party(STRANGER)
    for node in (receiver, other):
        node.task = TaskSettings()
        node.data = SimpleNamespace(spec=DataSpec("digits", (1, 8, 8), 10, (0.5,), (0.5,)))
    mode = {"relay": "relay", "direct": "auto"}[request.param]
    links = links_of(sender, receiver, other, mode=mode)
    route = links.route(SENDER, RECEIVER, VIRTUAL_DATA)

    def sent():
        return links.forward(route, send(sender, route, PAYLOAD))

    return SimpleNamespace(sent=sent, receiver=receiver, other=other, kind=request.param)


def keep(receiver, rank, delivery):
    bounds = ParcelBounds(images=3, of_a_class=1, server_round=1)
    return keep_parcel(receiver, rank, delivery, bounds)


def changed_by_one_bit(parcels):
    delivery = parcels.sent()
    if parcels.kind == "relay":
        delivery["payload"] = with_a_changed_bit(delivery["payload"])
    else:
        (path,) = (parcels.receiver.store.folder / "links" / "mailbox").iterdir()
        path.write_bytes(with_a_changed_bit(path.read_bytes()))
    return parcels.receiver, delivery, "does not open"


def with_a_changed_bit(sealed):
    middle = len(sealed) // 2
    return sealed[:middle] + bytes([sealed[middle] ^ 1]) + sealed[middle + 1 :]


def replayed(parcels):
    delivery = parcels.sent()
    assert keep(parcels.receiver, 0, delivery)
    return parcels.receiver, delivery, "token is spent"


def another_with_a_spent_token(parcels):
    """By relay, since the mailbox refuses it too, with a line of its own."""
    assert keep(parcels.receiver, 0, parcels.sent())
    return parcels.receiver, parcels.sent(), "token is spent"


def handed_to_the_wrong_node(parcels):
    return parcels.other, parcels.sent(), f"is for node {RECEIVER}"


def redirected_to_the_wrong_node(parcels):
    delivery = parcels.sent()
    delivery["receiver"] = str(STRANGER)  # by the server
    return (
        parcels.other,
        delivery,
        {"relay": "does not open", "direct": "not in the mailbox"}[parcels.kind],
    )


@pytest.mark.parametrize(
    "case",
    [
        changed_by_one_bit,
        replayed,
        another_with_a_spent_token,
        handed_to_the_wrong_node,
        redirected_to_the_wrong_node,
    ],
)
def test_what_is_refused_is_set_aside_with_a_line_in_the_log(parcels, refusals, case):
    receiver, delivery, why = case(parcels)
    assert not keep(receiver, 1, delivery)
    line = refusals.messages[-1]
    assert line.startswith(f"Parcel from node {SENDER} rejected: ")
    assert why in line
    assert receiver.store.file("parcel-000001") is None


@pytest.mark.parametrize("parcels", ["relay"], indirect=True)  # else the mailbox refuses it
def test_a_relayed_parcel_over_the_limit_is_set_aside_with_a_line_in_the_log(parcels, refusals):
    delivery = parcels.sent()
    delivery["largest"] = 100
    assert not keep(parcels.receiver, 1, delivery)
    (line,) = refusals.messages
    assert "more than the 100 allowed" in line
