"""One phase after another: send, check each reply, compare them, report, enforce the quorum."""

import math
import random
from collections.abc import Callable, Mapping
from logging import WARNING

from flwr.app import Error, Message
from flwr.common import log

from flwr_distill.base.text import counted, listed
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.replies import SET_ASIDE, UNREADABLE, Stage, set_aside
from flwr_distill.server.grid.failures import reason_of, told
from flwr_distill.server.grid.nodes import Nodes
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.transport import Received, Transport
from flwr_distill.server.hooks import Hook, PhaseEnd

Check = Callable[[Message, Message], str]
"""Why a reply to a message is rejected; empty if it is not."""


class QuorumError(RuntimeError):
    """Fewer nodes than the quorum sent usable training results."""


class Pipeline:
    """What a phase's messages and replies pass.

    Errors of nodes are logged here, one line for each distinct reason of a phase, so that no
    strategy can pass over them in silence. Python's global generator is seeded again for each round
    and after each phase, because Flower's strategies sample nodes with it, and its retries draw
    from it too.

    Parameters
    ----------
    transport : Transport
        Sends and receives.
    nodes : Nodes
        Whose order replies come in.
    screening : Screening or None
        Checks replies, and compares them; None accepts all.
    phases : Mapping[str, Phase]
        Phases of the run by message type.
    seed : int
        Of the run.
    quorum : float
        Share of nodes that must send a usable reply in time, in phases with a quorum.
    hooks : Hook
        What sees the end of each phase.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Nodes,
        screening: Screening | None,
        phases: Mapping[str, Phase],
        *,
        seed: int,
        quorum: float,
        hooks: Hook,
    ) -> None:
        self.nodes = nodes
        self.failures = transport.failures
        self._transport = transport
        self._screening = screening
        self._phases = phases
        self._seed = seed
        self._quorum = quorum
        self._hooks = hooks
        self.begin_round(0)

    def begin_round(self, server_round: int) -> None:
        """Seed node sampling for a round; drop what was noted in the one before."""
        self.round = server_round
        self.failures.begin_round()
        self.answered: dict[str, bool] = {}
        """Whether any node sent something usable, by phase of this round."""
        random.seed(f"{self._seed} {server_round}")

    def ask(
        self, messages: list[Message], timeout: float | None, check: Check | None = None
    ) -> list[Message]:
        """Have a phase's messages pass all stages; return the replies in the order of the nodes.

        Parameters
        ----------
        messages : list[Message]
            All of one type, at least one.
        timeout : float or None
            Seconds to wait, if shorter than the deadline.
        check : Check, optional (default: None)
            Checks each reply; None for the screening's own.

        Raises
        ------
        QuorumError
            If fewer nodes than the quorum sent a usable reply.
        """
        received = self.receive(messages, timeout, check)
        self.book_phase(received.phase, received.seconds, len(messages), received.replies)
        replies = self.settled(received)
        self.note_answers(received.phase, replies)
        self.check_quorum(received, replies, len(messages))
        return replies

    def receive(
        self, messages: list[Message], timeout: float | None, check: Check | None = None
    ) -> Received:
        """Push messages, and check replies as they arrive, until the deadline."""
        if check is None and self._screening:
            check = self._screening.check

        def accept(message: Message, reply: Message) -> Message:
            reason = check(message, reply) if check and reply.has_content() else ""
            return self._rejected(message, reason) if reason else reply

        self.nodes.stop_waiting()
        phase = messages[0].metadata.message_type
        title = self._phases[phase].title if phase in self._phases else phase
        return self._transport.receive(messages, timeout, title, accept)

    def settled(self, received: Received) -> list[Message]:
        """Replies in the order of the nodes, compared with each other; failures are logged."""
        phase, messages = received.phase, received.messages
        rank = self.nodes.rank
        replies = sorted(received.replies, key=lambda reply: rank(reply.metadata.src_node_id))
        if self._screening:
            by_node = {message.metadata.dst_node_id: message for message in messages}
            reasons = self._screening.compare(phase, by_node, replies, self.nodes.ids)
            replies = [
                self._rejected(by_node[node], reasons[node])
                if (node := reply.metadata.src_node_id) in reasons
                else reply
                for reply in replies
            ]
        random.seed(f"{self._seed} {self.round} {phase}")
        self.nodes.refresh()
        self._log_errors(phase, replies)
        asked = {message.metadata.dst_node_id for message in messages}
        if late := asked - {reply.metadata.src_node_id for reply in replies}:
            self._log_late(phase, self.nodes.in_order(late), len(messages), received.wait)
        return replies

    def note_answers(self, phase: str, replies: list[Message]) -> None:
        """Note whether any node sent something usable in a phase."""
        usable = any(reply.has_content() for reply in replies)
        self.answered[phase] = self.answered.get(phase, False) or usable

    def book_phase(self, phase: str, seconds: float, asked: int, replies: list[Message]) -> None:
        """Have hooks see a phase that is over."""
        nodes = {str(r.metadata.src_node_id): _numbers(r) for r in replies if r.has_content()}
        journal = self.failures.journal
        server_round = journal.round if journal else self.round
        self._hooks.on_phase(PhaseEnd(server_round, phase, seconds, asked, nodes))

    def check_quorum(self, received: Received, replies: list[Message], num_nodes: int) -> None:
        """Check that enough of so many nodes have sent a usable reply, in phases with a quorum.

        Raises
        ------
        QuorumError
            If they have not.
        """
        phase = received.phase
        if phase not in self._phases or not self._phases[phase].quorum:
            return
        answered = sum(reply.has_content() for reply in replies)
        needed = math.ceil(round(self._quorum * num_nodes, 6))
        if answered < needed:
            journal = self.failures.journal
            where = f"round {journal.round}, {phase}" if journal else phase
            raise QuorumError(
                f"{where}: {answered} of {counted(num_nodes, 'node')} sent a usable reply within "
                f"{received.wait:.0f} s, and quorum = {self._quorum} needs {needed} (bring the "
                "others back, raise phase-timeout, or lower quorum). "
                f"{told(self.failures.by_node)}"
            )

    def _rejected(self, message: Message, reason: str) -> Message:
        """An error reply in place of one that screening rejects."""
        node, phase = message.metadata.dst_node_id, message.metadata.message_type
        reason = one_line(reason)  # it may quote what the node sent
        set_aside(self.failures, node, phase, reason, "screening")
        return Message(Error(SET_ASIDE, reason), reply_to=message)

    def _log_errors(self, phase: str, replies: list[Message]) -> None:
        """Log why nodes failed, and mark their replies as logged."""
        new: dict[int, list[str]] = {}
        for reply in replies:
            if reply.has_error():
                node, reason = reply.metadata.src_node_id, reason_of(reply.error.reason or "")
                if reply.error.code != SET_ASIDE:
                    stage: Stage = "transport" if reply.error.code == UNREADABLE else "node"
                    self.failures.book(node, phase, reason, stage)
                    new[node] = [reason]
                    reply.error = Error(SET_ASIDE, reason)
        if new:
            log(WARNING, "%s failed in %s: %s", counted(len(new), "node"), phase, told(new))

    def _log_late(self, phase: str, late: list[int], asked: int, wait: float) -> None:
        for node in late:
            reason = f"did not reply to {phase} within {wait:.0f} s"
            self.failures.book(node, phase, reason, "transport")
        text = "%s continues without %d of %s, which did not reply within %.0f s: %s"
        names = listed([str(node) for node in late])
        log(WARNING, text, phase, len(late), counted(asked, "node"), wait, names)


def _numbers(reply: Message) -> dict[str, float]:
    """Finite numbers in a reply's metrics."""
    return {
        key: value
        for record in reply.content.metric_records.values()
        for key, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
