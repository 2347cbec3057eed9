"""Spaces the looks for messages of the many nodes that take part in a phase.

Nodes look often once they have replied. A SuperLink answers a few hundred looks a second in all,
and those of a hundred nodes would hold up the replies that the phase still waits for.
"""

from collections.abc import Sequence

from flwr.app import ConfigRecord, Message

from protocol.messages import LOOK_EVERY, PACE

LOOKS = 100
"""A second, by all nodes of a phase together: a small part of what a SuperLink answers."""
FEW = 5
"""Nodes whose looks need no spacing."""


def space_looks(messages: Sequence[Message]) -> None:
    """Write into a phase's messages how long nodes wait between looks, if they are many."""
    if len(messages) <= FEW:
        return
    record = ConfigRecord({LOOK_EVERY: len(messages) / LOOKS})
    for message in messages:
        message.content[PACE] = record
