"""A run's journal: data that were read, phases, replies rejected, warnings in the log."""

import errno
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from flwr.app import ArrayRecord

from flwr_distill.base.files import replacing
from flwr_distill.protocol.replies import Stage
from flwr_distill.server.hooks import Hook, PhaseEnd, RoundEnd
from flwr_distill.server.names import FLOWER_LOGGER
from flwr_distill.task.errors import with_remedy


class Journal(Hook, logging.Handler):
    """Writes ``journal.jsonl`` line by line as things happen; phases list nodes by Flower's id.

    Each line has its round and its time, in seconds since 1970.

    As a context manager, it also records warnings and errors in Flower's log, where strategies
    report nodes. For a resumed run, `rounds` are its finished ones: later lines are removed.
    """

    def __init__(self, file: Path, rounds: int | None = None) -> None:
        super().__init__(logging.WARNING)
        self.round = 0 if rounds is None else rounds + 1
        """Round of the next lines; 0 is before the first."""
        self._file = file
        self._latest: dict[str, tuple[int, dict[str, dict[str, float]]]] = {}
        self._set_aside: Counter[int] = Counter()
        self._failed = False
        self._read: set[str] = set()
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text("" if rounds is None else _lines_up_to(file, rounds))

    def __enter__(self) -> Self:
        FLOWER_LOGGER.addHandler(self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        FLOWER_LOGGER.removeHandler(self)
        if isinstance(error, Exception) and not self._failed:  # before its first round
            self.on_failure(error, None)

    def stop(self) -> None:
        """Within ``with``, record that the run is stopped, and nothing after that."""
        if self in FLOWER_LOGGER.handlers:
            self._write(stopped=True)
            FLOWER_LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Record a warning or an error."""
        if record.levelno < logging.ERROR:
            self._write(warning=record.getMessage())
        else:
            self.book_error(record.getMessage())

    def book_error(self, text: str) -> None:
        """Record an error; a report opens with them."""
        self._write(error=text)

    def on_phase(self, phase: PhaseEnd) -> None:
        """Record a phase: its duration and the metrics of each reply without an error."""
        nodes = {node: dict(numbers) for node, numbers in phase.nodes.items()}
        self._latest[phase.name] = (self.round, nodes)
        self._set_aside[self.round] += sum(int(n.get("rejected", 0)) for n in nodes.values())
        seconds = round(phase.seconds, 3)
        self._write(phase=phase.name, seconds=seconds, asked=phase.asked, nodes=nodes)

    def book_scores(self, phase: str, nodes: Mapping[int, Mapping[str, float]]) -> None:
        """Record scores of nodes from their counts."""
        self._write(scored=phase, nodes={str(node): dict(own) for node, own in nodes.items()})

    def book_codecs(self, choice: Mapping[str, Any]) -> None:
        """Record which codecs ``auto`` has chosen, and why."""
        self._write(codecs=choice)

    def on_round_end(self, end: RoundEnd) -> None:
        """Begin the next round."""
        self.round = end.row.round + 1

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Record why the run failed."""
        self._failed = True
        self.book_error(f"The run failed. {with_remedy(type(error).__name__, str(error))}")

    def book_set_aside(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node's reply was rejected, and at which stage."""
        self._set_aside[self.round] += 1
        self._write(set_aside=str(node), reply_to=phase, stage=stage, reason=reason)

    def book_failure(self, node: int, phase: str, reason: str, stage: Stage) -> None:
        """Record that a node sent nothing usable, and at which stage that showed."""
        self._write(failed=str(node), reply_to=phase, stage=stage, reason=reason)

    def book_data(self, nodes: Mapping[str, Mapping[str, Any]], server: str) -> None:
        """Record samples and fingerprints of nodes, once each, and the server's fingerprint."""
        new = {node: read for node, read in nodes.items() if node not in self._read}
        if new:
            self._read |= new.keys()
            self._write(read=new, read_by_server=server)

    @property
    def set_aside(self) -> int:
        """Replies rejected this round, plus parcels and models that heads and leaders rejected."""
        return self._set_aside[self.round]

    def mean(self, category: str, key: str) -> float | None:
        """Unweighted mean over nodes of a metric of this round; None if no node reported it.

        It includes all message types of a category: ``evaluate``, ``evaluate.mine``.
        """
        values = [
            numbers[key]
            for phase, (last_round, nodes) in self._latest.items()
            if phase.partition(".")[0] == category and last_round == self.round
            for numbers in nodes.values()
            if key in numbers
        ]
        return fmean(values) if values else None

    def _write(self, **entry: Any) -> None:
        """Append a line whole or not at all: behind half a line, no resumed run could read it."""
        line = {"round": self.round, "time": round(time.time(), 1), **entry}
        content = json.dumps(line).encode() + b"\n"
        assert self.lock
        with self.lock, self._file.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
            except OSError:
                file.truncate(size)
                raise


def _lines_up_to(file: Path, rounds: int) -> str:
    """Lines of the first rounds, without a half-written last one (the process was killed)."""
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    lines = [line for line in whole.splitlines() if json.loads(line)["round"] <= rounds]
    return "".join(f"{line}\n" for line in lines)
