"""One phase after another: send, check each reply, compare them, report, enforce the quorum."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING

from flwr.app import ArrayRecord, Error, Message
from flwr.common import log

from flwr_distill.base.text import counted, listed
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.replies import SET_ASIDE, UNREADABLE, Stage, reason_of, set_aside
from flwr_distill.server.grid.buffer import Buffer
from flwr_distill.server.grid.failures import Failures, reasons_text
from flwr_distill.server.grid.message_lines import log_message
from flwr_distill.server.grid.node_counts import NodeCounts
from flwr_distill.server.grid.nodes import Nodes
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.transport import Received, Transport
from flwr_distill.server.hooks import Hook, PhaseEnd
from flwr_distill.task.errors import ReportedError

Check = Callable[[Message, Message], str]
"""Why a reply to a message is rejected; empty if it is not."""


LATE_REMEDY = (
    "see their logs: do they run, and is their network up? Slow nodes need a longer phase-timeout"
)


class QuorumError(ReportedError):
    """Fewer nodes than the quorum sent usable training results."""


@dataclass
class Pipeline:
    """The stages of a phase's messages and replies.

    Errors of nodes are logged here, one line for each distinct reason of a phase, so that no
    strategy can pass over them in silence. Python's global generator is seeded again for each round
    and after each phase, because Flower's strategies sample nodes with it, and its retries draw
    from it too.
    """

    transport: Transport
    nodes: Nodes  # replies come in their order
    screening: Screening | None  # None accepts all replies
    phases: Mapping[str, Phase]  # of the run, by message type
    seed: int
    quorum: float  # share of nodes that must send a usable reply in time
    hooks: Hook
    counts: NodeCounts
    buffer: Buffer | None = None

    def __post_init__(self) -> None:
        self.begin_round(0)

    @property
    def failures(self) -> Failures:
        """Why nodes sent nothing usable."""
        return self.transport.failures

    @property
    def busy(self) -> set[int]:
        """Nodes that still train for an earlier round."""
        return self.buffer.busy if self.buffer else set()

    def begin_round(self, server_round: int) -> None:
        """Seed node sampling for a round; drop the notes of the one before."""
        self.round = server_round
        self.failures.begin_round()
        self.transport.codec.round = server_round
        if self.buffer:
            self.buffer.round = server_round
        self.answered: dict[str, bool] = {}
        """Whether any node sent something usable, by phase of this round."""
        random.seed(f"{self.seed} {server_round}")

    def ask(
        self, messages: list[Message], timeout: float | None, check: Check | None = None
    ) -> list[Message]:
        """Run all stages of a phase; return the replies in the order of the nodes.

        `check` is by default the screening's. Raises QuorumError.
        """
        if self.buffer:
            return self._ask_idle(self.buffer, messages, timeout, check)
        received = self.receive(messages, timeout, check)
        self.book_phase(received.phase, received.seconds, len(messages), received.replies)
        replies = self.settled(received)
        self._take_counts(received.phase, replies)
        self.note_answers(received.phase, replies)
        self.check_quorum(received, replies, len(messages))
        return replies

    def _ask_idle(
        self,
        buffer: Buffer,
        messages: list[Message],
        timeout: float | None,
        check: Check | None,
    ) -> list[Message]:
        """Run a phase with the nodes that do not train; one of training ends with some replies."""
        phase = messages[0].metadata.message_type
        model = messages[0].content.array_records.get(ARRAYS, ArrayRecord())
        messages = buffer.idle(messages)
        buffered = phase in buffer.phases
        if not messages and not (buffered and buffer.pending):
            return []
        received = self.receive(messages, timeout, check, buffer if buffered else None)
        self.book_phase(phase, received.seconds, len(messages), received.replies)
        replies = self.settled(received)
        if buffered:
            buffer.count_in(replies, as_arrays(model))
        self._take_counts(phase, replies)
        self.note_answers(phase, replies)
        return replies

    def ask_aside(self, messages: list[Message], timeout: float | None) -> list[Message]:
        """Checked replies to messages that are of no phase of the round, in the nodes' order."""
        return self.settled(self.receive(messages, timeout)) if messages else []

    def receive(
        self,
        messages: list[Message],
        timeout: float | None,
        check: Check | None = None,
        buffer: Buffer | None = None,
    ) -> Received:
        """Push messages, and check replies as they arrive, until the deadline.

        With a `buffer`, until it has enough of them, those to its messages among them.
        """
        if check is None and self.screening:
            check = self.screening.check

        def accept(message: Message, reply: Message) -> Message:
            reason = check(message, reply) if check and reply.has_content() else ""
            if buffer and reply.has_content() and not reason:
                reason = buffer.why_too_late(reply)
            if reason:
                return self._rejected(message, reason)
            failed = ""
            if reply.has_error():
                failed = f"failed: {reason_of(reply.error.reason, reply.error.code)}"
            log_message(message, failed or "replied", self.transport.names)
            return reply

        self.nodes.stop_waiting()
        if buffer:
            return self.transport.receive_some(messages, timeout, accept, buffer)
        phase = messages[0].metadata.message_type
        title = self.phases[phase].title if phase in self.phases else phase
        return self.transport.receive(messages, timeout, title, accept)

    def settled(self, received: Received) -> list[Message]:
        """Replies in the order of the nodes, compared with each other; failures are logged."""
        phase, messages = received.phase, received.messages
        rank = self.nodes.rank
        replies = sorted(received.replies, key=lambda reply: rank(reply.metadata.src_node_id))
        by_node = {message.metadata.dst_node_id: message for message in messages}
        if self.screening:
            reasons = self.screening.compare(phase, by_node, replies, self.nodes.ids)
            replies = [
                self._rejected(by_node[node], reasons[node])
                if (node := reply.metadata.src_node_id) in reasons
                else reply
                for reply in replies
            ]
        random.seed(f"{self.seed} {self.round} {phase}")
        self.nodes.refresh()
        self._log_errors(phase, replies)
        if late := by_node.keys() - {reply.metadata.src_node_id for reply in replies}:
            self._log_late(phase, self.nodes.in_order(late), len(messages), received.wait)
            for node in late:
                log_message(by_node[node], "no reply in time", self.transport.names)
        return replies

    def note_answers(self, phase: str, replies: list[Message]) -> None:
        """Note whether any node sent something usable in a phase."""
        usable = any(reply.has_content() for reply in replies)
        self.answered[phase] = self.answered.get(phase, False) or usable

    def book_phase(
        self, phase: str, seconds: float, num_asked: int, replies: list[Message]
    ) -> None:
        """Report the end of a phase to the hooks."""
        nodes = {str(r.metadata.src_node_id): _numbers(r) for r in replies if r.has_content()}
        journal = self.failures.journal
        server_round = journal.round if journal else self.round
        self.hooks.on_phase(PhaseEnd(server_round, phase, seconds, num_asked, nodes))

    def _take_counts(self, phase: str, replies: list[Message]) -> None:
        """Take counts out of replies, before a strategy sees these; report the nodes' scores."""
        journal = self.failures.journal
        scored = self.counts.take(journal.round if journal else self.round, phase, replies)
        if journal and scored:
            journal.book_scores(phase, scored)

    def check_quorum(self, received: Received, replies: list[Message], num_nodes: int) -> None:
        """Raise QuorumError if too few of so many nodes sent a usable reply, where it matters."""
        phase = received.phase
        if phase not in self.phases or not self.phases[phase].quorum:
            return
        answered = sum(reply.has_content() for reply in replies)
        needed = math.ceil(round(self.quorum * num_nodes, 6))
        if answered < needed:
            journal = self.failures.journal
            place = f"round {journal.round}, {phase}" if journal else phase
            raise QuorumError(
                f"{place}: {answered} of {counted(num_nodes, 'node')} sent a usable reply within "
                f"{received.wait:.0f} s, {needed} must: {reasons_text(self.failures.by_node)}",
                where="quorum",
                value=self.quorum,
                remedy="bring the others back, raise phase-timeout, or lower quorum",
            )

    def _rejected(self, message: Message, reason: str) -> Message:
        """An error reply in place of one that screening rejects."""
        node, phase = message.metadata.dst_node_id, message.metadata.message_type
        reason = one_line(reason)  # it may quote what the node sent
        set_aside(self.failures, node, phase, reason, "screening")
        log_message(message, f"rejected: {reason}", self.transport.names)
        return Message(Error(SET_ASIDE, reason), reply_to=message)

    def _log_errors(self, phase: str, replies: list[Message]) -> None:
        new: dict[int, list[str]] = {}
        for reply in replies:
            if reply.has_error() and reply.error.code != SET_ASIDE:
                node = reply.metadata.src_node_id
                reason = reason_of(reply.error.reason, reply.error.code)
                stage: Stage = "transport" if reply.error.code == UNREADABLE else "node"
                self.failures.book(node, phase, reason, stage)
                new[node] = [reason]
                reply.error = Error(SET_ASIDE, reason)
        if new:
            log(WARNING, "%s failed in %s: %s", counted(len(new), "node"), phase, reasons_text(new))

    def _log_late(self, phase: str, late: list[int], num_asked: int, wait: float) -> None:
        for node in late:
            reason = f"did not reply to {phase} within {wait:.0f} s"
            self.failures.book(node, phase, reason, "transport")
        text = "%s continues without %d of %s, which did not reply within %.0f s: %s (%s)"
        names = listed([str(node) for node in late])
        log(WARNING, text, phase, len(late), counted(num_asked, "node"), wait, names, LATE_REMEDY)


def _numbers(reply: Message) -> dict[str, float]:
    """Finite numbers in a reply's metrics."""
    return {
        key: value
        for record in reply.content.metric_records.values()
        for key, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
