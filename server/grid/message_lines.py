"""Lines about single messages: by Flower's id they join those of the message's node."""

from collections.abc import Mapping
from logging import INFO

from flwr.app import Message
from flwr.common import log

from flwr_distill.base import json_lines


def log_message(message: Message, what: str, names: Mapping[int, str]) -> None:
    """Log what happened to a message; in a log as text the lines about phases are enough."""
    if json_lines.wanted():
        sent = message.metadata
        name = names.get(sent.dst_node_id, str(sent.dst_node_id))
        about = {"node": name, "message_id": sent.message_id}
        log(INFO, "%s, %s: %s", sent.message_type, name, what, extra={"about": about})
