"""Who has made secure sums fail, and when to ask such a node again."""

from collections.abc import Collection, Iterable
from logging import WARNING

from flwr.common import log

from flwr_distill.strategies.common.retries import Retries


class Blame:
    """Nodes that secure sums go without.

    One that has lied for all to see is left out until the run ends. One that may be why a sum has
    failed, such as one that was silent, is asked again after 1, 2, 4, 8 ... rounds, so that it
    spoils the fewer sums the more it has spoilt, and a lost connection costs no more than a round.
    """

    def __init__(self) -> None:
        self._lies: dict[int, str] = {}
        self._doubts: dict[int, str] = {}
        self._retries = Retries()

    def lied(self, node: int, reason: str) -> None:
        """Leave a node out until the run ends."""
        if node not in self._lies:
            log(WARNING, "Secure sums continue without node %d: %s", node, reason)
            self._lies[node] = reason

    def doubted(self, nodes: Iterable[int], server_round: int, reason: str) -> None:
        """Let nodes pause that may be why a sum has failed in this round."""
        for node in nodes:
            if node not in self._lies and self._retries.due(node, server_round):
                self._retries.failed(node, server_round)
                self._doubts[node] = reason

    def left_out(self, nodes: Collection[int], server_round: int, fewest: int) -> dict[int, str]:
        """Why a round's sums go without some of these nodes, by node.

        Pauses end early where fewer than `fewest` nodes would be left.
        """
        lies = {node: self._lies[node] for node in nodes if node in self._lies}
        pausing = {
            node: f"it pauses, since an earlier sum has failed: {self._doubts[node]}"
            for node in nodes
            if node not in lies and not self._retries.due(node, server_round)
        }
        return lies if len(nodes) - len(lies) - len(pausing) < fewest else lies | pausing
