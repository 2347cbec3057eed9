"""A member's parcel that its head refuses is logged and dropped, whichever way it came."""

from types import SimpleNamespace

import pytest
import torch

from flwr_distill.distill import VirtualData
from flwr_distill.links import send
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.strategies.hfldd.client import keep_parcel
from flwr_distill.strategies.hfldd.requests import ParcelBounds
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.settings import TaskSettings

from .conftest import RECEIVER, SENDER

BOUNDS = ParcelBounds(images=3, of_a_class=1, server_round=1)
PAYLOAD = VirtualData(
    torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]), "test", steps=1, seed=0, init="noise"
).to_bytes()


def with_a_changed_bit(sealed):
    middle = len(sealed) // 2
    return sealed[:middle] + bytes([sealed[middle] ^ 1]) + sealed[middle + 1 :]


@pytest.mark.parametrize("kind", ["relay", "direct"])
def test_a_refused_parcel_is_logged_and_not_kept(party, listening, links_of, flower_log, kind):
    sender, receiver = party(SENDER), listening(RECEIVER)
    receiver.task = TaskSettings()
    receiver.data = SimpleNamespace(spec=DataSpec("digits", (1, 8, 8), 10, (0.5,), (0.5,)))
    links = links_of(sender, receiver, mode=kind)

    def sent():
        route = links.route(SENDER, RECEIVER, VIRTUAL_DATA)
        return links.forward(route, send(sender, route, PAYLOAD))

    good, changed = sent(), sent()
    assert keep_parcel(receiver, 0, good, BOUNDS)
    if kind == "relay":
        changed["payload"] = with_a_changed_bit(changed["payload"])
    else:
        path = receiver.store.folder / "links" / "mailbox" / changed["token"]
        path.write_bytes(with_a_changed_bit(path.read_bytes()))
    for delivery, why in ((good, "token is spent"), (changed, "does not open")):
        assert not keep_parcel(receiver, 1, delivery, BOUNDS)
        line = flower_log.messages[-1]
        assert line.startswith(f"Parcel from node {SENDER} rejected: ")
        assert why in line
    assert receiver.store.file("parcel-000001") is None
