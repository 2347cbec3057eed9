"""What may still leave: an app's own words over a day, and virtual images over a run."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from flwr_distill.node.parcels import Payload, virtual_data_in
from flwr_distill.node.requests import MessageRequest, Refusal
from flwr_distill.protocol.meeting import one_line

MAX_CHARACTERS = 10_000
"""Of all errors that leave in a day."""
MAX_RUNS = 1_000
"""Runs whose images are counted."""
_DAY = datetime.timedelta(days=1)

Images = dict[str, dict[int, int]]
"""Images of each label, by the SHA-256 of the virtual data that hold them."""


class WordBudget:
    """Characters of the app's own words that may still leave: they may quote samples."""

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


class VirtualImages:
    """Counts the virtual images of runs that leave without differential privacy, but for raw data.

    Each needs `real_per_virtual` real samples of its class; with 1 nothing is counted.
    """

    def __init__(self, real_per_virtual: int) -> None:
        self._real_per_virtual = real_per_virtual
        self._left: dict[str, Images] = {}

    def with_reply(
        self, run: str, request: MessageRequest, payloads: Mapping[str, Payload]
    ) -> Images:
        """All that a run would have if a reply left; the same virtual data count once.

        VirtualDataError if the reply's are malformed.
        """
        if self._real_per_virtual == 1:
            return {}
        images = dict(self._left.get(run, {}))
        if request.virtual_epsilon:  # a rule has judged it
            return images
        for payload in virtual_data_in(payloads):
            virtual = payload.virtual_data
            if virtual.method != "raw":
                counts = zip(virtual.labels, virtual.images_of_class, strict=True)
                images[payload.digest] = dict(counts)
        return images

    def judge(self, images: Images, class_sizes: Sequence[int]) -> Refusal | None:
        """Judge a run's images by the node's samples of each class, largest classes first.

        Which class is which only the app knows.
        """
        least, of_class = self._real_per_virtual, Counter[int]()
        for counts in images.values():
            of_class.update(counts)
        sizes = chain(sorted(class_sizes, reverse=True), repeat(0))
        for number, samples in zip(sorted(of_class.values(), reverse=True), sizes, strict=False):
            if number * least > samples:
                reason = f"{least}, and the run would have {number} virtual images of {samples}"
                return Refusal("real-per-virtual", f"{reason} samples (lower it, or ask for noise)")
        return None

    def note(self, run: str, images: Images) -> None:
        """Note what a run has; call it before the reply leaves."""
        if images:
            self._left.pop(run, None)
            self._left[run] = images
            if len(self._left) > MAX_RUNS:
                del self._left[next(iter(self._left))]
