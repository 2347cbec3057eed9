"""A message as Flower encodes it."""

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects


def encoded_bytes(message: Message) -> int:
    """Bytes of the objects that Flower would send for a message."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
