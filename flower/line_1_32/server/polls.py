"""Spaces the polls for messages of the many nodes that take part in a phase.

Nodes poll often once they have replied. A SuperLink answers a few hundred polls a second in all,
and those of a hundred nodes would delay the replies for which the phase still waits.
"""

from collections.abc import Sequence

from flwr.app import ConfigRecord, Message

from flwr_distill.protocol.messages import PACE, POLL_EVERY

POLLS = 100
"""Polls a second of all nodes of a phase: a small part of what a SuperLink answers."""
FEW = 5
"""Nodes whose polls need no spacing."""


def space_polls(messages: Sequence[Message]) -> None:
    """Write into a phase's messages how long nodes wait between polls, if they are many."""
    if len(messages) <= FEW:
        return
    record = ConfigRecord({POLL_EVERY: len(messages) / POLLS})
    for message in messages:
        message.content[PACE] = record
