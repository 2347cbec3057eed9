"""Flower Grid with fast polling, a deadline for each phase, and byte counts."""

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.protocol.edge import SHARE
from flwr_distill.protocol.messages import ROUTE
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.registry import phases_of
from flwr_distill.protocol.replies import SET_ASIDE, UNREADABLE, Stage, set_aside
from flwr_distill.server.grid.exchange import exchange_over
from flwr_distill.server.grid.failures import reason_of, told
from flwr_distill.server.grid.ids import make_id_random
from flwr_distill.server.grid.inbox import Most
from flwr_distill.server.grid.ledger import Ledger, content_bytes, num_parts
from flwr_distill.server.grid.progress import Progress
from flwr_distill.server.grid.spool import Spool
from flwr_distill.server.grid.together import name_companions
from flwr_distill.server.hooks import Hook, PhaseEnd
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.words import counted, listed

FIRST_POLL = 0.02
LONGEST_POLL = 0.5
SOON = 0.05
"""Longest poll while a reply is on its way."""
ROOM = 2**26
"""Bytes that any reply may have."""
PARTS = 1000
"""Records, and arrays in them, that any reply may have."""
MODELS = 4
"""Bytes and parts that a reply may have besides, in units of what it answers."""
LEAST_WAIT = 1.0
"""Seconds that a phase may take in any case."""
PAUSE_SHARE = 0.1
"""Share of a phase's deadline; who pauses longer between two calls for the nodes is not waiting."""
MIN_PAUSE = 5.0
"""Least such pause, in seconds; Flower's strategies poll every second."""
WAIT_MARGIN = 2.0
"""Seconds beyond the deadline, in which waits that have their own error raise that one."""
SAME_LOOK = 0.5
"""Seconds for which a list of connected nodes is reused within a phase."""


Accept = Callable[[Message, Message], Message]
"""Checks a reply to a message as it arrives; gives it, or an error reply in its place."""


@dataclass(frozen=True)
class Received:
    """What came of a phase's messages before the deadline.

    Parameters
    ----------
    messages : list[Message]
        What was sent.
    replies : list[Message]
        In the order in which they arrived.
    seconds : float
        How long it took.
    wait : float
        How long it might have taken.
    """

    messages: list[Message]
    replies: list[Message]
    seconds: float
    wait: float

    @property
    def phase(self) -> str:
        """Message type."""
        return self.messages[0].metadata.message_type


class QuorumError(RuntimeError):
    """Fewer nodes than the quorum sent usable training results."""


class MeteredGrid(Grid):
    """Wraps the Grid that Flower passes to a ServerApp.

    Nodes and replies come in the order of ``order``, so sums over replies do not depend on which
    node was faster. Flower's strategies sample nodes with Python's global generator, which is
    seeded again for each round and after each phase, because Flower's retries draw from it too.

    Errors of nodes are logged here, one line for each distinct reason of a phase, so that no
    strategy can pass over them in silence.

    Parameters
    ----------
    grid : Grid
        Flower's own grid, of a deployment or a simulation.
    deadline : float
        Seconds after which a phase ends without the nodes that have not replied.
    seed : int (default: 0)
        Seed of the run, for sampling nodes.
    journal : Journal, optional (default: None)
        Where rejected replies are recorded.
    quorum : float (default: 0.0)
        Share of nodes that must send a usable reply in time, in phases with a quorum.
    phases : Mapping[str, Phase], optional (default: None)
        Phases of the run by message type; None allows those of all methods.
    hooks : Hook, optional (default: None)
        What sees the end of each phase; None for the journal alone.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        seed: int = 0,
        journal: Journal | None = None,
        quorum: float = 0.0,
        phases: Mapping[str, Phase] | None = None,
        hooks: Hook | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.order: Mapping[int, int] = {}
        """Rank of each known node id; unknown nodes come after these, by id."""
        self.together: Mapping[int, int] = {}
        """Partition of each virtual node that trains together with others."""
        self.names: Mapping[int, str] = {}
        """Names of nodes by id, for the log; may grow meanwhile."""
        self.left_out: Collection[int] = ()
        """Connected nodes that cannot take part."""
        self.wanted = "the number of nodes that it needs"
        """What makes the strategy wait for nodes, for errors: its settings, with their values."""
        self.due = math.inf
        """When an edge owes its answer above, in monotonic seconds: phases end well before it."""
        self._grid = grid
        self._exchange = exchange_over(grid)
        self._deadline = deadline
        self._seed = seed
        self._journal = journal
        self._hooks = hooks or journal or Hook()
        self._quorum = quorum
        self._phases = phases_of(None) if phases is None else phases
        self._nodes: list[int] = []
        self._looked = -math.inf
        self._alone_since = math.inf
        self._waiting_since = math.inf
        self._asked = -math.inf
        self.begin_round(0)

    def begin_round(self, server_round: int) -> None:
        """Seed node sampling for a round; forget the failures of the one before."""
        self._round = server_round
        self.failures: dict[int, list[str]] = {}
        """Why nodes sent nothing usable in this round."""
        self.answered: dict[str, bool] = {}
        """Whether any node sent something usable, by phase of this round."""
        random.seed(f"{self._seed} {server_round}")

    def set_run(self, run: Any) -> None:
        """Set the run this grid operates in."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Run information."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message (deprecated in Flower, part of its interface)."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> list[int]:
        """Ids of connected nodes that can take part, in the order of ``order``.

        Raises
        ------
        TooFewNodesError
            If no node has been connected for as long as a phase may take. Or if a strategy has
            polled for so long, without a message or a pause, because it needs more nodes.
        """
        # Flower counts the nodes, then samples that many from a second list, and waits without
        # end if that one is shorter: both must be the same list.
        now = time.monotonic()
        paused = now > self._asked + max(MIN_PAUSE, PAUSE_SHARE * self._deadline)
        self._waiting_since = now if paused else min(self._waiting_since, now)
        self._asked = now
        if not self._nodes or now > self._looked + SAME_LOOK:
            self._nodes, self._looked = list(self._grid.get_node_ids()), now
        self._alone_since = math.inf if self._nodes else min(self._alone_since, now)
        if now > self._alone_since + self._deadline:
            raise TooFewNodesError(
                f"no node has been connected for phase-timeout = {self._deadline:.0f} s "
                "(start nodes, or raise phase-timeout)"
            )
        able = [node for node in self._nodes if node not in self.left_out]
        if now > self._waiting_since + self._deadline + WAIT_MARGIN:
            self._waiting_since = math.inf
            raise TooFewNodesError(
                f"the strategy waited phase-timeout = {self._deadline:.0f} s for more nodes than "
                f"the {len(able)} that can take part (start more, or lower {self.wanted})"
            )
        return sorted(able, key=self._rank)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push messages with ids that nobody can guess, and count their bytes."""
        messages = list(messages)
        self._waiting_since = math.inf
        for message in messages:
            make_id_random(message)
        self.ledger.book_sent(messages)
        return self._exchange.push(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies without counting them; only :meth:`send_and_receive` counts."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push the messages of a phase and wait for replies, until the deadline.

        Parameters
        ----------
        messages : Iterable[Message]
            All of one type.
        timeout : float, optional (default: None)
            Seconds to wait, if shorter than the grid's deadline.

        Returns
        -------
        list[Message]
            Replies, error replies included, in the order of the nodes. The log names the nodes that
            did not reply in time.

        Raises
        ------
        QuorumError
            If fewer nodes than the quorum sent a usable reply.
        """
        messages = list(messages)
        if not messages:
            return []
        received = self._receive(messages, timeout, self._accepted)
        self._book_phase(received.phase, received.seconds, len(messages), received.replies)
        replies = self._settled(received)
        self._note_answers(received.phase, replies)
        self._check_quorum(received, replies, len(messages))
        return replies

    def _receive(self, messages: list[Message], timeout: float | None, accept: Accept) -> Received:
        """Push messages, and check and count replies as they arrive, until the deadline."""
        wait = min(self._deadline, math.inf if timeout is None else timeout)
        wait = min(wait, max(LEAST_WAIT, SHARE * (self.due - time.monotonic())))
        for message in messages:
            message.metadata.ttl = min(message.metadata.ttl, wait)
        phase = messages[0].metadata.message_type
        if phase == MessageType.TRAIN:
            name_companions(messages, self.together)
        self._exchange.prepare(messages)
        start = time.monotonic()
        pending = dict(zip(self.push_messages(messages), messages, strict=True))
        pending.pop("", None)  # messages that the SuperLink refused have no id
        replies, spool = [], Spool()
        by_node = {message.metadata.dst_node_id: message for message in messages}
        title = self._phases[phase].title if phase in self._phases else phase
        progress = Progress(title, len(messages), self.names)
        for arrived in self._arriving(pending, start + wait, progress):
            self.ledger.book_received(arrived)
            reply = accept(by_node[arrived.metadata.src_node_id], arrived)
            if reply.has_content():
                self.ledger.book_parcels(reply)
                spool.keep(reply.content)
            replies.append(reply)
        return Received(messages, replies, time.monotonic() - start, wait)

    def _settled(self, received: Received) -> list[Message]:
        """Replies in the order of the nodes, compared with each other; failures are logged."""
        phase, messages = received.phase, received.messages
        replies = sorted(received.replies, key=lambda reply: self._rank(reply.metadata.src_node_id))
        replies = self._screened(messages, replies)
        random.seed(f"{self._seed} {self._round} {phase}")
        self._nodes = []
        self._log_errors(phase, replies)
        asked = {message.metadata.dst_node_id for message in messages}
        if late := asked - {reply.metadata.src_node_id for reply in replies}:
            self._log_late(phase, sorted(late, key=self._rank), len(messages), received.wait)
        return replies

    def _note_answers(self, phase: str, replies: list[Message]) -> None:
        self.answered[phase] = self.answered.get(phase, False) or any(
            reply.has_content() for reply in replies
        )

    def book_set_aside(self, node: int, phase: str, reason: str, stage: Stage = "strategy") -> None:
        """Record that a node's reply was rejected; see `protocol.replies.set_aside`."""
        self.failures.setdefault(node, []).append(reason_of(reason))
        if self._journal:
            self._journal.book_set_aside(node, phase, reason, stage)

    def _book_failure(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node sent nothing usable."""
        self.failures.setdefault(node, []).append(reason)
        if self._journal:
            self._journal.book_failure(node, phase, reason, stage)

    def _book_phase(self, phase: str, seconds: float, asked: int, replies: list[Message]) -> None:
        """Have hooks see a phase that is over."""
        nodes = {str(r.metadata.src_node_id): _numbers(r) for r in replies if r.has_content()}
        server_round = self._journal.round if self._journal else self._round
        self._hooks.on_phase(PhaseEnd(server_round, phase, seconds, asked, nodes))

    def _accepted(self, message: Message, reply: Message) -> Message:
        """Check one reply as it arrives; subclasses may return an error reply instead."""
        return reply

    def _most(self, message: Message) -> Most:
        """The most in a reply to a message; subclasses that know the run's model allow for it."""
        routes = (
            record.get("largest", 0)
            for name, record in message.content.config_records.items()
            if name.partition(".")[0] == ROUTE
        )
        parcels = sum(size for size in routes if isinstance(size, int))
        return Most(
            ROOM + MODELS * content_bytes(message.content) + parcels,
            PARTS + MODELS * num_parts(message.content),
        )

    def _screened(self, messages: list[Message], replies: list[Message]) -> list[Message]:
        """Compare the replies; subclasses may replace some by error replies."""
        return replies

    def _log_errors(self, phase: str, replies: list[Message]) -> None:
        """Log why nodes failed, and mark their replies as logged."""
        new: dict[int, list[str]] = {}
        for reply in replies:
            if reply.has_error():
                node, reason = reply.metadata.src_node_id, reason_of(reply.error.reason or "")
                if reply.error.code != SET_ASIDE:
                    stage: Stage = "transport" if reply.error.code == UNREADABLE else "node"
                    self._book_failure(node, phase, reason, stage)
                    new[node] = [reason]
                    reply.error = Error(SET_ASIDE, reason)
        if new:
            log(WARNING, "%s failed in %s: %s", counted(len(new), "node"), phase, told(new))

    def _log_late(self, phase: str, late: list[int], asked: int, wait: float) -> None:
        for node in late:
            reason = f"did not reply to {phase} within {wait:.0f} s"
            self._book_failure(node, phase, reason, "transport")
        text = "%s continues without %d of %s, which did not reply within %.0f s: %s"
        names = listed([str(node) for node in late])
        log(WARNING, text, phase, len(late), counted(asked, "node"), wait, names)

    def _check_quorum(self, received: Received, replies: list[Message], num_nodes: int) -> None:
        """Check that enough of so many nodes have sent a usable reply, in phases with a quorum."""
        phase = received.phase
        if phase not in self._phases or not self._phases[phase].quorum:
            return
        answered = sum(reply.has_content() for reply in replies)
        needed = math.ceil(round(self._quorum * num_nodes, 6))
        if answered < needed:
            where = f"round {self._journal.round}, {phase}" if self._journal else phase
            raise QuorumError(
                f"{where}: {answered} of {counted(num_nodes, 'node')} sent a usable reply within "
                f"{received.wait:.0f} s, and quorum = {self._quorum} needs {needed} (bring the "
                f"others back, raise phase-timeout, or lower quorum). {told(self.failures)}"
            )

    def _rank(self, node: int) -> tuple[int, int]:
        return self.order.get(node, len(self.order)), node

    def _arriving(
        self, messages: Mapping[str, Message], end: float, progress: Progress
    ) -> Iterator[Message]:
        """Replies as they arrive, until all are in or it is `end`, in monotonic seconds."""
        inbox, poll = self._exchange.open_inbox(messages, self._most), FIRST_POLL
        while inbox.waiting and time.monotonic() < end:
            poll = min(poll * 1.5, SOON if inbox.coming else LONGEST_POLL)
            for reply in inbox.fetch(end):
                poll = FIRST_POLL
                yield reply
            for message, reason in inbox.rejected:
                sent = message.metadata
                set_aside(self, sent.dst_node_id, sent.message_type, reason, "transport")
            inbox.rejected.clear()
            progress.show(messages[waiting].metadata.dst_node_id for waiting in inbox.waiting)
            if inbox.waiting:
                time.sleep(poll)
        inbox.close()


def _numbers(reply: Message) -> dict[str, float]:
    """Finite numbers in a reply's metrics."""
    return {
        key: value
        for record in reply.content.metric_records.values()
        for key, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
