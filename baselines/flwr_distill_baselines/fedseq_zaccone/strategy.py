"""FedSeq of Zaccone et al.: the model passes through superclients of unlike nodes."""

from collections.abc import Mapping
from logging import INFO
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.base.text import counted
from flwr_distill.protocol.messages import CONFIG, METRICS
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.common.topology import FlatClusters
from flwr_distill_baselines.common.passing.messages import Turns
from flwr_distill_baselines.common.passing.strategy import SequentialStrategy
from flwr_distill_baselines.fedseq_zaccone.grouping import greedy_superclients, superclient_to_join
from flwr_distill_baselines.fedseq_zaccone.method import (
    CONFIDENCE,
    REPORT_CONFIDENCE,
    TURNS,
    FedSeqSettings,
)


class FedSeq(SequentialStrategy):
    """Sequential training in superclients, which are averaged (Zaccone et al. 2022).

    Before the first round every node trains the initial model and reports its mean prediction.
    Nodes with unlike predictions form a superclient, until it has enough samples or nodes
    (`grouping.greedy_superclients`). In each round the global model passes through the nodes of
    every superclient, in random order. New nodes join the superclient that they even out most.

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    **kwargs
        Settings (`method.FedSeqSettings`), and arguments of `SequentialStrategy`.

    Notes
    -----
    In the paper the server has labelled samples to test the pre-trained models on; here predictions
    are on an auxiliary set without labels, as in HFLDD.
    """

    settings: FedSeqSettings = FedSeqSettings()
    run_arguments = (*SequentialStrategy.run_arguments, "num_classes")
    turns: ClassVar[Turns] = TURNS

    def __init__(self, *, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self._confidences: dict[int, list[float]] = {}

    @property
    def topology(self) -> FlatClusters | None:
        """The superclients; None before they are formed."""
        return FlatClusters(tuple(map(tuple, self.groups))) if self.groups else None

    def order(self, group: list[int], draws: np.random.Generator) -> list[int]:
        """A random one, another in each round."""
        return [group[i] for i in draws.permutation(len(group))]

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {**super().state_dict(), "confidences": dict(self._confidences)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self._confidences = {node: list(each) for node, each in state["confidences"].items()}

    def form(self, server_round: int) -> None:
        """Form superclients of the first nodes, or have new ones join."""
        connected = self.grid.get_node_ids()
        about = self._directory.look_up(self.grid, connected, self.phase_timeout)
        new = [
            node
            for node in connected
            if node not in self._confidences
            and not about[node].missing
            and self._retries.due(node, server_round)
        ]
        confidences = self._confidences_of(new)
        for node in new:
            if node not in confidences:
                self._retries.failed(node, server_round)
        if not self.groups:
            if not confidences:
                nodes = counted(len(new), "node")
                raise NothingUsableError(f"no predictions came from {nodes}")
            self._confidences = confidences
            samples = self._directory.samples(connected)
            groups = greedy_superclients(
                np.array(list(confidences.values())),
                np.array([samples[node] for node in confidences]),
                self.settings.least_samples,
                self.settings.most_nodes,
            )
            order = list(confidences)
            self.groups = [[order[place] for place in group] for group in groups]
            log(INFO, "FedSeq: %s formed", counted(len(groups), "superclient"))
            return
        for node, confidence in confidences.items():
            self._join(node, confidence)

    def _join(self, node: int, confidence: list[float]) -> None:
        """Put a new node into the superclient that it evens out most, or one of its own."""
        order = {known: place for place, known in enumerate(self._confidences)}
        samples = self._directory.num_examples
        joined = superclient_to_join(
            [[order[known] for known in group] for group in self.groups],
            np.array(list(self._confidences.values())),
            np.array([samples.get(known, 1) for known in order]),
            np.array(confidence),
            self.settings.most_nodes,
        )
        self._confidences[node] = confidence
        if joined is None:
            self.groups.append([node])
        else:
            self.groups[joined].append(node)

    def _confidences_of(self, nodes: list[int]) -> dict[int, list[float]]:
        """Mean predictions by node; a reply without a distribution is rejected."""
        request = RecordDict(
            {CONFIG: ConfigRecord(self.settings.pretraining.model_dump(by_alias=True))}
        )
        replies = self._ask([Message(request, node, REPORT_CONFIDENCE) for node in nodes])
        confidences = {}
        for node, reply in replies.items():
            confidence = reply.content.metric_records.get(METRICS, MetricRecord()).get(CONFIDENCE)
            values = confidence if isinstance(confidence, list) else []
            if len(values) == self.num_classes and abs(sum(values) - 1) < 1e-3:
                confidences[node] = [float(value) for value in values]
            else:
                self.set_aside(reply, "it predicts no distribution")
        return confidences
