"""Rounds that end with some of the replies; the others count in later ones (FedBuff).

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022).
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import Any

from flwr.app import Message
from flwr.common import log
from numpy.typing import NDArray

from flwr_distill.base.text import counted
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods, buffered_in
from flwr_distill.server.grid.inbox import Inbox
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError


@dataclass(frozen=True)
class Pending:
    """A message whose reply is still to come."""

    message: Message
    round: int
    end: float
    """When its reply no longer counts, in ``time.monotonic()`` seconds."""


@dataclass
class Buffer:
    """Messages whose nodes still train, over rounds.

    Parameters
    ----------
    phases : Collection[str]
        Message types that it is for: their replies are models, of which the strategy needs the mean
        weighted by samples, and no more.
    size : int
        K, usable replies with which a round ends.
    max_staleness : int
        Rounds by which a reply may be late; later ones are rejected.
    """

    phases: Collection[str]
    size: int
    max_staleness: int
    inbox: Inbox | None = None
    """For the replies to `pending`; one for all rounds, as closing one loses what has half
    arrived."""
    pending: dict[str, Pending] = field(default_factory=dict)
    """By message id."""
    round: int = 0

    def idle(self, messages: Sequence[Message]) -> list[Message]:
        """The messages whose nodes do not train."""
        busy = self.busy
        return [message for message in messages if message.metadata.dst_node_id not in busy]

    @property
    def busy(self) -> set[int]:
        """Nodes that still train."""
        return {one.message.metadata.dst_node_id for one in self.pending.values()}

    def add(self, messages: Mapping[str, Message], end: float) -> None:
        """Note messages of this round, by id."""
        self.pending |= {n: Pending(message, self.round, end) for n, message in messages.items()}

    def expire(self) -> list[Pending]:
        """Remove messages whose time is over."""
        now = time.monotonic()
        expired = {name: one for name, one in self.pending.items() if one.end <= now}
        for name in expired:
            del self.pending[name]
            if self.inbox:
                self.inbox.forget(name)
        return list(expired.values())

    def why_too_late(self, reply: Message) -> str:
        """Why a reply is rejected; empty if it is not too late."""
        late = self.round - self.pending[reply.metadata.reply_to_message_id].round
        if late <= self.max_staleness:
            return ""
        return f"it trained a model of {late} rounds ago, and max-staleness is {self.max_staleness}"

    def count_in(self, replies: Sequence[Message], now: Arrays) -> None:
        """Remove the messages of replies, and have late ones count as those of this round.

        Their models become this round's, `now`, moved by their updates; their samples count for
        less.
        """
        late = []
        for reply in replies:
            sent = self.pending.pop(reply.metadata.reply_to_message_id)
            if reply.has_content() and sent.round < self.round:
                late.append(self.round - sent.round)
                self._move(reply, sent, now)
        if late:
            text = "Models of %s had a start of up to %s before"
            log(INFO, text, counted(len(late), "node"), counted(max(late), "round"))

    def _move(self, reply: Message, sent: Pending, now: Arrays) -> None:
        start = as_arrays(sent.message.content.array_records[ARRAYS])
        trained = as_arrays(reply.content.array_records[ARRAYS])
        reply.content[ARRAYS] = as_record(rebased(trained, start, now))
        metrics = reply.content.metric_records[METRICS]
        weight = staleness_weight(self.round - sent.round)
        metrics[NUM_EXAMPLES] = float(metrics[NUM_EXAMPLES]) * weight  # type: ignore[arg-type]


def buffer_of(settings: RunSettings, method: Method | None) -> Buffer | None:
    """Make a run's buffer, if it has one.

    Raises SettingsError if its method or another setting needs all replies of a round.
    """
    if not settings.buffer:
        return None
    phases = buffered_in(method) if method and settings.strategy == method.name else ()
    if not phases:
        able = sorted(name for name, other in all_methods().items() if buffered_in(other))
        reason = f"strategy = {settings.strategy!r} may need all replies (take {', '.join(able)})"
    elif settings.secure_sums:
        reason = "secure sums are of the nodes of one round (set secure-sums to false)"
    elif settings.quorum:
        reason = "quorum counts the nodes of one round (set quorum to 0)"
    elif settings.edge:
        reason = "an edge answers with the mean of all its nodes (set it to 0)"
    else:
        return Buffer(phases, settings.buffer, settings.max_staleness)
    raise SettingsError(reason, where="buffer", value=settings.buffer)


def staleness_weight(staleness: int) -> float:
    """Weight of an update that is so many rounds old: 1 / sqrt(1 + staleness)."""
    return 1 / math.sqrt(1 + staleness)


def rebased(trained: Arrays, start: Arrays, now: Arrays) -> Arrays:
    """The model `now`, moved as another start was: ``now + (trained - start)``.

    Integers, such as BatchNorm's count of batches, are those of the trained model.
    """

    def moved(name: str, array: NDArray[Any]) -> NDArray[Any]:
        own: NDArray[Any] = now[name]
        return own + (array - start[name]) if array.dtype.kind == "f" else array

    return {name: moved(name, array) for name, array in trained.items()}
