"""How many virtual images leave a node in a run, against the real ones behind them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from flwr.app import RecordDict

from flwr_distill.node.asked import Asked, Refusal
from flwr_distill.node.replies import bounded_virtual_data

MAX_RUNS = 1_000
"""Runs whose images are counted."""

Images = dict[str, dict[int, int]]
"""Images of each label, by the SHA-256 of the virtual data that hold them."""


class VirtualImages:
    """Counts the virtual images of runs that have no differential privacy; not samples as they are.

    Parameters
    ----------
    least : int
        Real samples of its class that each needs; with 1 nothing is counted.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._left: dict[str, Images] = {}

    def with_reply(
        self, run: str, asked: Asked, reply: RecordDict, opened: Mapping[str, bytes]
    ) -> Images:
        """All that a run would have if a reply left; the same virtual data count once.

        Raises
        ------
        VirtualDataError
            If the reply's are none.
        """
        from flwr_distill.distill.virtual_overview import Overview  # here: imports torch

        if self._least == 1:
            return {}
        images = dict(self._left.get(run, {}))
        if asked.virtual_epsilon:  # a rule has judged it
            return images
        for payload, most in bounded_virtual_data(asked, reply, opened):
            virtual = Overview.of(payload, most)
            if virtual.method != "raw":
                counts = zip(virtual.labels, virtual.images_of_class, strict=True)
                images[hashlib.sha256(payload).hexdigest()] = dict(counts)
        return images

    def judge(self, images: Images, class_sizes: Sequence[int]) -> Refusal | None:
        """Judge a run's images by the node's samples of each class, largest classes first.

        Which class is which only the app knows.
        """
        least, of_class = self._least, Counter[int]()
        for counts in images.values():
            of_class.update(counts)
        sizes = chain(sorted(class_sizes, reverse=True), repeat(0))
        for made, samples in zip(sorted(of_class.values(), reverse=True), sizes, strict=False):
            if made * least > samples:
                reason = f"{least}, and the run would have {made} virtual images of {samples}"
                return Refusal("real-per-virtual", f"{reason} samples (lower it, or ask for noise)")
        return None

    def note(self, run: str, images: Images) -> None:
        """Note what a run has; call it before the reply leaves."""
        if images:
            self._left.pop(run, None)
            self._left[run] = images
            if len(self._left) > MAX_RUNS:
                del self._left[next(iter(self._left))]
