"""A run's journal: every phase as it ends, every reply set aside, every warning of the log."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from flwr.app import Message
from flwr.common.logger import FLOWER_LOGGER


class Journal(logging.Handler):
    """Writes ``journal.jsonl`` at once: each phase, each reply set aside, each warning.

    What nodes did wrong, strategies say in warnings; inside ``with``, those are written too. Nodes
    stand in it by Flower's ids.

    Parameters
    ----------
    file : Path
        Where to write.
    rounds : int, optional (default: None)
        Of a run that is resumed, the rounds that are over: their lines stay, and those of later
        ones go. If None, the file is begun anew.
    """

    def __init__(self, file: Path, rounds: int | None = None) -> None:
        super().__init__(logging.WARNING)
        self.round = 0 if rounds is None else rounds + 1
        """What the next lines belong to; 0 is before the first round."""
        self._file = file
        self._latest: dict[str, tuple[int, dict[str, dict[str, float]]]] = {}
        self._set_aside: Counter[int] = Counter()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if rounds is None else _lines_up_to(file, rounds))

    def __enter__(self) -> Self:
        FLOWER_LOGGER.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        FLOWER_LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning."""
        self._write(warning=record.getMessage())

    def book_phase(
        self, phase: str, seconds: float, asked: int, replies: Iterable[Message]
    ) -> None:
        """Write a phase: how long it took, and the numbers that nodes gave.

        Parameters
        ----------
        phase : str
            A message type.
        seconds : float
            From the first message to the last reply, or to the deadline.
        asked : int
            Nodes that got a message.
        replies : Iterable[Message]
            Those of the nodes; of error replies nothing is kept but the lack of numbers.
        """
        nodes = {str(r.metadata.src_node_id): _numbers(r) for r in replies if r.has_content()}
        self._latest[phase] = (self.round, nodes)
        self._set_aside[self.round] += sum(int(n.get("rejected", 0)) for n in nodes.values())
        self._write(phase=phase, seconds=round(seconds, 3), asked=asked, nodes=nodes)

    def book_set_aside(self, node: int, phase: str, reason: str) -> None:
        """Write that a node's reply was set aside.

        Parameters
        ----------
        node : int
            Flower's node id.
        phase : str
            A message type.
        reason : str
            Why.
        """
        self._set_aside[self.round] += 1
        self._write(set_aside=str(node), reply_to=phase, reason=reason)

    @property
    def set_aside(self) -> int:
        """Set aside in this round: replies of nodes, and what heads and leaders rejected."""
        return self._set_aside[self.round]

    def mean(self, phase: str, key: str) -> float | None:
        """Mean over nodes, each counting the same, of a number that they gave in this round.

        Parameters
        ----------
        phase : str
            A message type.
        key : str
            Name of the number; None is returned where no node gave it.
        """
        asked_in, nodes = self._latest.get(phase, (self.round, {}))
        given = [numbers[key] for numbers in nodes.values() if key in numbers]
        return fmean(given) if given and asked_in == self.round else None

    def _write(self, **entry: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"round": self.round, **entry}) + "\n")


def _lines_up_to(file: Path, rounds: int) -> str:
    """Lines of the first rounds; a killed process may have left the last line half written."""
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    lines = [line for line in whole.splitlines() if json.loads(line)["round"] <= rounds]
    return "".join(f"{line}\n" for line in lines)


def _numbers(reply: Message) -> dict[str, float]:
    """Finite numbers in a reply's metrics."""
    return {
        key: value
        for record in reply.content.metric_records.values()
        for key, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
