"""Why nodes sent nothing usable."""

from collections.abc import Mapping, Sequence

from flwr_distill.protocol.replies import Stage, reason_of
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.directory import by_reason


class Failures:
    """Reasons of this round by node; the journal, if there is one, has those of all rounds."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        self.by_node: dict[int, list[str]] = {}

    def begin_round(self) -> None:
        """Drop the failures of the round before."""
        self.by_node = {}

    def book(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node sent nothing usable."""
        self.by_node.setdefault(node, []).append(reason)
        if self.journal:
            self.journal.book_failure(node, phase, reason, stage)

    def book_set_aside(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node's reply was rejected; see `protocol.replies.set_aside`."""
        self.by_node.setdefault(node, []).append(reason_of(reason))
        if self.journal:
            self.journal.book_set_aside(node, phase, reason, stage)


def reasons_text(failures: Mapping[int, Sequence[str]]) -> str:
    """Reasons with their nodes, the most frequent one first; see `by_reason`."""
    distinct = {str(node): list(dict.fromkeys(reasons)) for node, reasons in failures.items()}
    return "; ".join(by_reason(distinct))
