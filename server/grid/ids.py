"""Ids of messages that nobody can guess."""

import re
import secrets

from flwr.app import Message

RANDOM_BYTES = 16
"""Bytes of chance in a message's id."""
_NONCE = re.compile(rf"#[0-9a-f]{{{2 * RANDOM_BYTES}}}$")


def make_id_random(message: Message) -> None:
    """Put random bits into a message, before it is pushed.

    A message's id is the hash of its metadata and content. Without these bits any node can compute
    it from its own message, but for another node's id and a time in microseconds. A node that knows
    an id can try to reply to it. The bits follow the group, the only text in Flower's metadata that
    is free; replies repeat it, so that their ids are as random.
    """
    group = _NONCE.sub("", message.metadata.group_id)
    message.metadata.group_id = f"{group}#{secrets.token_hex(RANDOM_BYTES)}"
