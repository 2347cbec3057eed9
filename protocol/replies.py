"""Reading nodes' replies: errors are logged, numbers checked."""

import math
import re
from collections.abc import Iterable
from logging import WARNING
from typing import Literal, Protocol

from flwr.app import Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import METRICS
from flwr_distill.task.errors import ReportedError

UNKNOWN = 0
"""Flower's code of an error of no other kind."""
UNAVAILABLE = 5
"""Flower's code of the error in place of a reply that a lost node owes."""
SET_ASIDE = 100
"""Error code, above Flower's own, of an error reply whose reason was logged."""
REFUSED = 101
"""Error code of a reply with which a node's policy refuses a message, or withholds an answer."""
UNREADABLE = 102
"""Error code that the server gives a reply that is too large, or unreadable."""

Stage = Literal["transport", "node", "screening", "secure sums", "strategy"]
"""Where it shows that a reply is missing or not usable."""

MAX_TEXT = 100_000
"""Characters of an error that are read: a node may send megabytes."""
_RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""Exception of a ClientApp, as Flower writes it into an error reply."""
_AWAY = "the SuperLink lost it (is it running, and its network up? Its log says more)"
"""Of a node that did not answer in time to the SuperLink, or was restarted."""
_UNAVAILABLE = "Error: Node Unavailable"
"""Begins Flower's own words for that."""
_NO_HANDLER = re.compile(r"No \w+ function registered with name")
"""What Flower's ClientApp says to a message type that it has no function for."""


class NothingUsableError(ReportedError):
    """No node sent anything usable in a phase that a run needs."""


def usable(replies: Iterable[Message]) -> list[Message]:
    """Replies that carry content; error replies are logged with node and reason."""
    with_content = []
    for reply in replies:
        if reply.has_error() and reply.error.code == SET_ASIDE:
            continue
        if reply.has_error():
            node, phase = reply.metadata.src_node_id, reply.metadata.message_type
            log(WARNING, "Node %d failed in %s: %s", node, phase, reply.error.reason)
        else:
            with_content.append(reply)
    return with_content


def reason_of(error_text: str | None, code: int = UNKNOWN) -> str:
    """What a node's error says, on one short line that is safe to print; see `one_line`."""
    text = (error_text or "")[:MAX_TEXT].strip()
    if code == UNAVAILABLE and text.startswith(_UNAVAILABLE):
        return _AWAY
    raised = _RAISED.fullmatch(text)
    return one_line(f"{raised[1]}: {raised[2]}" if raised else text) or "no reason given"


def no_handler(error_text: str) -> bool:
    """Whether an error says that a node's ClientApp has no handler for the message's type."""
    return _NO_HANDLER.search(error_text) is not None


def has_no_handler(reply: Message) -> bool:
    """Whether a reply says that the node's ClientApp has no handler for the message's type."""
    return reply.has_error() and no_handler(reply.error.reason or "")


def handlers_remedy(method: str) -> str:
    """How to have nodes answer a method's messages, in a line."""
    return (
        f'add_methods(app, "{method}", model=..., data=...) of client.handlers adds them to a '
        'ClientApp, or take clientapp = "flwr_distill.client_app:app"; see docs/own-apps.md'
    )


def books_replies(grid: Grid) -> bool:
    """Whether a grid is that of our ServerApp, which keeps an account of replies."""
    return hasattr(grid, "book_set_aside")


class Account(Protocol):
    """Keeps an account of the replies that are rejected."""

    def book_set_aside(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node's reply is not used, and what rejects it."""


def set_aside(
    grid: Grid | Account, node: int, phase: str, reason: str, stage: Stage = "strategy"
) -> None:
    """Log that a node's reply is not used, and why in one line; a grid with an account books it.

    `phase` is the message type that was replied to, `stage` what rejects the reply.
    """
    log(WARNING, "Reply of node %d to %s rejected: %s", node, phase, reason)
    getattr(grid, "book_set_aside", lambda *reply: None)(node, phase, reason, stage)


def number(reply: Message, key: str) -> float:
    """Finite number under ``key`` in a reply's metrics.

    Raises ValueError if there is none.
    """
    value = reply.content.metric_records.get(METRICS, MetricRecord()).get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"node {reply.metadata.src_node_id}: metric {key} is {value!r}")
    return value
