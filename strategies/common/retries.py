"""When to ask a failing node again."""

from collections.abc import Mapping


class Retries:
    """Asks again after 1, 2, 4, 8 ... rounds, so that no broken node delays every round."""

    def __init__(self, state: Mapping[int, list[int]] | None = None) -> None:
        self._attempts = {node: (attempts, due) for node, (attempts, due) in (state or {}).items()}

    def due(self, node: int, server_round: int) -> bool:
        """Whether to ask a node in this round."""
        return server_round >= self._attempts.get(node, (0, 0))[1]

    def failures(self, node: int) -> int:
        """How often a node failed."""
        return self._attempts.get(node, (0, 0))[0]

    def failed(self, node: int, server_round: int) -> None:
        """Note that a node failed."""
        attempts, _ = self._attempts.get(node, (0, 0))
        self._attempts[node] = attempts + 1, server_round + 2**attempts

    def state_dict(self) -> dict[int, list[int]]:
        """Failed attempts of each node, and the round in which to ask again."""
        return {node: list(tried) for node, tried in self._attempts.items()}
