"""Clips what a node sends where central differential privacy asks for it."""

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod

from flwr_distill.protocol.messages import CLIPPING_NORM, CONFIG, TOGETHER


def clipped(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Flower's mod that clips the update, for messages with a clipping norm only.

    It also tells whether the update was longer (``norm_bit``). Virtual nodes then train one by one.
    """
    if CLIPPING_NORM not in message.content.config_records.get(CONFIG, ConfigRecord()):
        return call_next(message, context)
    message.content.pop(TOGETHER, None)
    return adaptiveclipping_mod(message, context, call_next)
