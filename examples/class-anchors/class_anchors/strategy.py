"""The server: asks for class means and sends their average with each train message."""

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from class_anchors.method import (
    ANCHORS,
    CLASS_MEANS,
    COUNTS,
    MEANS,
    PULL,
    AnchorSettings,
    Survey,
)
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record, sent_arrays
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.replies import usable
from flwr_distill.strategies.common.checked import CheckedFedAvg


class ClassAnchors(CheckedFedAvg):
    """FedAvg whose nodes keep the features of a class near the federation's mean of it.

    Nodes that miss a class pull the features of theirs to where it suits them alone; the anchors,
    which all share, prevent that (:class:`class_anchors.client.Anchored`).

    Parameters
    ----------
    phase_timeout : float (default: 600.0)
        Seconds to wait for class means.
    **kwargs
        Settings (`class_anchors.method.AnchorSettings`), and what Flower's FedAvg takes.
    """

    settings: AnchorSettings = AnchorSettings()
    run_arguments = ("phase_timeout",)  # what the constructor takes of a run
    state_keys = ("anchors",)  # what a checkpoint keeps, so that a resumed run has them

    def __init__(self, *, phase_timeout: float = 600.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phase_timeout = phase_timeout
        self.anchors: Arrays = {}
        """``means`` and ``pull``, as nodes get them; empty before the first survey."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Survey the class means where it is time for it, then have the sampled nodes train."""
        if (server_round - 1) % self.settings.every == 0:
            self._survey(arrays, grid)
        return super().configure_train(server_round, arrays, config, grid)

    def records(self) -> Mapping[str, ArrayRecord]:
        """Give what joins each train message; a record of this name asks for the loss term."""
        return {ANCHORS: as_record(self.anchors)} if self.anchors else {}

    def _survey(self, arrays: ArrayRecord, grid: Grid) -> None:
        survey = ConfigRecord(Survey(fewest=self.settings.fewest).model_dump(by_alias=True))
        content = RecordDict({ARRAYS: arrays, CONFIG: survey})
        messages = [Message(content, node, CLASS_MEANS) for node in grid.get_node_ids()]
        replies = usable(grid.send_and_receive(messages, timeout=self.phase_timeout))
        reports = [as_arrays(sent_arrays(reply)) for reply in replies]
        if reports:
            self.anchors = mean_anchors(reports, self.settings.weight)
            num_anchors = np.count_nonzero(self.anchors[PULL])
            log(INFO, "%d nodes gave anchors for %d classes", len(reports), num_anchors)


def mean_anchors(reports: Sequence[Arrays], weight: float) -> dict[str, Any]:
    """Average the class means of nodes: ``a_c = sum_i n_ic m_ic / sum_i n_ic``.

    Parameters
    ----------
    reports : sequence of Mapping[str, ndarray]
        ``means`` (C, d) and ``counts`` (C,) of each node, at least one.
    weight : float
        Of the loss term.

    Returns
    -------
    dict[str, ndarray]
        ``means`` (C, d), and ``pull`` (C,): the weight, or 0 for a class that no node reported.
    """
    counts = np.stack([np.asarray(each[COUNTS], dtype=np.float64) for each in reports])
    sums = sum(n[:, None] * each[MEANS] for n, each in zip(counts, reports, strict=True))
    total = counts.sum(axis=0)
    means = sums / np.maximum(total, 1)[:, None]
    pull = np.where(total > 0, weight, 0.0)
    return {MEANS: means.astype(np.float32), PULL: pull.astype(np.float32)}
