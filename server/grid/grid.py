"""The Flower Grid that strategies use in a run."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.registry import phases_of
from flwr_distill.protocol.replies import Stage
from flwr_distill.server.grid.buffer import Buffer
from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.grid.node_counts import NodeCounts
from flwr_distill.server.grid.nodes import Nodes
from flwr_distill.server.grid.pipeline import Pipeline
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.secure_sums import SecureSums
from flwr_distill.server.grid.transport import Transport
from flwr_distill.server.hooks import Hook


class RunGrid(Grid):
    """Flower's interface to a run's transport, ledger, screening and secure sums.

    Nodes and replies come in the order of ``nodes.order``, so sums over replies do not depend on
    which node was faster. Without `screening` all replies are accepted; `phases` are by default
    those of all methods. In phases with a quorum, a share `quorum` of the nodes must send a usable
    reply in time. `hooks` (default: the journal) see the end of each phase. `counts` takes counts
    of held-out samples out of replies. With a `buffer`, nodes that still train for an earlier round
    get no message.
    """

    def __init__(
        self,
        transport: Transport,
        screening: Screening | None = None,
        sums: SecureSums | None = None,
        *,
        phases: Mapping[str, Phase] | None = None,
        seed: int = 0,
        quorum: float = 0.0,
        hooks: Hook | None = None,
        counts: NodeCounts | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        self.transport = transport
        self.nodes = Nodes(transport.grid, transport.deadline)
        self._sums = sums
        self._pipeline = Pipeline(
            transport,
            self.nodes,
            screening,
            phases_of(None) if phases is None else phases,
            seed=seed,
            quorum=quorum,
            hooks=hooks or transport.failures.journal or Hook(),
            counts=counts or NodeCounts(0, wanted=False),
            buffer=buffer,
        )

    @property
    def ledger(self) -> Ledger:
        """Bytes of the run so far."""
        return self.transport.ledger

    @property
    def failures(self) -> Mapping[int, list[str]]:
        """Why nodes sent nothing usable in this round."""
        return self.transport.failures.by_node

    @property
    def busy(self) -> set[int]:
        """Nodes that still train for an earlier round."""
        return self._pipeline.busy

    @property
    def answered(self) -> Mapping[str, bool]:
        """Whether any node sent something usable, by phase of this round."""
        return self._pipeline.answered

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge replies as this one does, for a checkpoint."""
        screening, sums = self._pipeline.screening, self._sums
        return {
            "screening": screening.state_dict() if screening else [],
            "blame": sums.blame.state_dict() if sums else {},
        }

    def load_state_dict(self, state: Mapping[str, Any], returned: Mapping[int, int]) -> None:
        """Take over what a checkpoint has; `returned` are the nodes' ids by their earlier ones."""
        if screening := self._pipeline.screening:
            screening.load_state_dict(state["screening"])
        if self._sums:
            self._sums.blame.load_state_dict(state["blame"], returned)

    def on_nodes(self, model: Arrays) -> Arrays:
        """A model as nodes have it that were sent it; see `ModelCodec.on_nodes`."""
        return self.transport.codec.on_nodes(model)

    def begin_round(self, server_round: int) -> None:
        """Seed node sampling for a round; drop the failures of the one before."""
        self._pipeline.begin_round(server_round)

    def book_set_aside(self, node: int, phase: str, reason: str, stage: Stage = "strategy") -> None:
        """Record that a node's reply was rejected; see `protocol.replies.set_aside`."""
        self.transport.failures.book_set_aside(node, phase, reason, stage)

    def set_run(self, run: Any) -> None:
        """Set the run this grid operates in."""
        self.transport.grid.set_run(run)

    @property
    def run(self) -> Any:
        """Run information."""
        return self.transport.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message (deprecated in Flower, part of its interface)."""
        return self.transport.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> list[int]:
        """Ids of connected nodes that can take part, in their order; see `Nodes.ids`."""
        return self.nodes.ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push messages with ids that nobody can guess, and count their bytes."""
        self.nodes.stop_waiting()
        return self.transport.push(list(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies without counting them; only :meth:`send_and_receive` counts."""
        return self.transport.grid.pull_messages(message_ids)

    def ask_aside(self, messages: list[Message], timeout: float | None = None) -> list[Message]:
        """Ask nodes beside a round's phases: the journal has failures of it, but no replies.

        Models travel exactly. Without a `timeout`, it is a phase's.
        """
        with self.transport.codec.exact():
            return self._pipeline.ask_aside(messages, timeout)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push the messages of a phase, all of one type, and wait for replies until the deadline.

        Returns replies, error replies included, in the order of the nodes; the log names late
        nodes. A `timeout` in seconds may shorten the deadline. Raises QuorumError if fewer nodes
        than the quorum sent a usable reply.
        """
        messages = list(messages)
        if not messages:
            return []
        if self._sums and messages[0].metadata.message_type in self._sums.summed:
            return self._sums.ask(self._pipeline, messages, timeout)
        return self._pipeline.ask(messages, timeout)
