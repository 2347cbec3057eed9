"""Models that a node receives from other nodes."""

from flwr.app import ConfigRecord

from flwr_distill.client.session import Session
from flwr_distill.links import receive
from flwr_distill.links.records import Delivery
from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.parcels import from_payload


def received_model(
    session: Session, delivery: ConfigRecord, purpose: str, start: Arrays | None = None
) -> Arrays:
    """The model in another node's parcel, decoded; unchecked but for its size.

    `start` is the model to which a difference is added. Raises LinkError if the parcel cannot be
    opened, ValueError if it holds no model.
    """
    payload = receive(session, delivery, purpose)
    largest = Delivery.checked(delivery, "delivery").largest
    return from_payload(payload, largest, start)
