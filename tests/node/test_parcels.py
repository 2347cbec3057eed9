"""What a node makes of another node's parcel before its app gets the message."""

from types import SimpleNamespace

import pytest
from flwr.app import RecordDict

from flwr_distill.node import parcels
from flwr_distill.node.parcels import Opener


@pytest.mark.parametrize("error", [OverflowError, RecursionError, ValueError])
def test_a_parcel_that_breaks_its_reader_does_not_make_the_receiver_fail(
    error, tmp_path, monkeypatch
):
    """Else the server would blame the receiver; as it is, the app rejects the sender's model."""

    def broken(payload, most):
        raise error("whatever")

    delivery = SimpleNamespace(payload=b"", largest=1)
    monkeypatch.setattr(parcels.Delivery, "checked", lambda record, where: delivery)
    monkeypatch.setattr(parcels, "unseal", lambda *sealed: b"")
    monkeypatch.setattr(parcels, "read_payload", broken)
    assert Opener(tmp_path, {}, 5, 7).delivered_model(RecordDict()) == {}
