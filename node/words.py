"""Bounds what leaves a node of its app's own words: they may quote samples."""

from __future__ import annotations

import datetime

from flwr_distill.protocol.meeting import one_line

MAX_CHARACTERS = 10_000
"""Of all errors that leave in a day."""
_DAY = datetime.timedelta(days=1)


class WordBudget:
    """Characters of the app's own words that may still leave."""

    def __init__(self) -> None:
        self._spent: list[tuple[datetime.datetime, int]] = []

    def spend(self, words: str, now: datetime.datetime) -> str:
        """What leaves in place of these words: one line of them, or that there were too many."""
        line = one_line(words)
        self._spent = [(when, size) for when, size in self._spent if now - when < _DAY]
        if sum(size for _, size in self._spent) + len(line) > MAX_CHARACTERS:
            return "the app failed, and its words of a day are used up (the node's log says why)"
        self._spent.append((now, len(line)))
        return line
