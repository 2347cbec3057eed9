"""Closed-form heads: one linear head from the nodes' sums of frozen features."""

import math
from collections.abc import Collection, Iterable
from functools import reduce
from logging import INFO, WARNING
from operator import add
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import nn

from flwr_distill.base.text import counted, listed
from flwr_distill.distill.analytic import (
    Head,
    Sums,
    best_penalty,
    best_shrinkage,
    deviations,
    noisy_penalty,
    random_directions,
    solved,
)
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record, sent_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import NUM_EXAMPLES
from flwr_distill.protocol.replies import number, usable
from flwr_distill.strategies.analytic.method import (
    BY_CLASS,
    COUNTS,
    EVALUATE_OWN,
    FEATURES,
    SUMS,
    TRAIN_SUMS,
    UNIT,
    AnalyticSettings,
    check_sums,
    record_of,
    sums_of,
    sums_of_means,
)
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.backbones import fingerprint
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import last_dense, last_dense_layer

_SCALED = (UNIT, BY_CLASS, COUNTS)


class Analytic(CheckedFedAvg):
    """A linear head in closed form on a frozen network, from one message a node.

    A node sends sums over its samples' features x: ``x x^T``, x by class, and counts. Added up,
    they are the sums over all samples, however these are spread, so the head is that of pooling the
    data (AFL, He et al. 2025; Fed3R, Fanì et al. 2024; FedCGS, Guan et al. 2025). In later rounds
    only nodes whose sums are missing get a message; one that is back under another id does not.
    Each node's sums are stored, in checkpoints too, so that a node can be taken out again
    (`forget`).

    Parameters
    ----------
    model : nn.Module
        The run's architecture, of which only the last dense layer is learnt.
    noise : float (default: 0.0)
        Noise multiplier with which nodes make their sums differentially private; 0 is without.
    seed : int (default: 0)
        Seed of the projection.
    directory : Directory, optional (default: None)
        Knows how many samples of a node count; None counts all.
    secure_sums : bool (default: False)
        Whether each reply has the mean of all nodes' sums, from a secure sum.
    **kwargs
        Settings (`strategies.analytic.method.AnalyticSettings`), and what Flower's FedAvg takes.

    Raises
    ------
    SettingsError
        If a setting is out of range, or the model's last dense layer has no bias.
    """

    settings: AnalyticSettings = AnalyticSettings()
    run_arguments = ("model", "seed", "directory", "secure_sums")
    state_keys = ("sums", "names")

    def __init__(
        self,
        *,
        model: nn.Module,
        noise: float = 0.0,
        seed: int = 0,
        directory: Directory | None = None,
        secure_sums: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._secure_sums = secure_sums
        self.sums: dict[int, Arrays] = {}
        """Sums of each node, by id, as they were sent; of a secure sum, by minus the round."""
        self.names: dict[int, str] = {}
        """Names of the nodes that sent sums."""
        self._noise = noise
        self._layer = last_dense(model)
        dense = last_dense_layer(model)
        if dense.bias is None:
            problem = f"{self._layer}, the model's last layer, has no bias"
            raise SettingsError(problem, where="analytic")
        if not fingerprint(model):
            log(WARNING, "The model is not frozen: features are those of its random start")
        self._classes, width = dense.out_features, dense.in_features
        projection = self.settings.projection
        self._network_width, self._width = width, projection or width
        if self._width > width:
            raise SettingsError(
                f"the model has {width} features",
                where="analytic.projection",
                value=projection,
                remedy="take fewer",
            )
        self._directions = random_directions(width, projection, seed) if projection else None
        self._directory = directory or Directory(most_samples=0)

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `CheckedFedAvg`."""
        own: dict[str, Any] = {"noise": run.train.dp_noise}
        if settings and settings.personal:  # there is no other accuracy of nodes' own heads
            own["fraction_evaluate"] = run.fraction_evaluate or 1.0
        return super().from_run(settings, run, **{**own, **arguments})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the sampled nodes whose sums are missing; they have the frozen network."""
        request = self.settings.request(self._classes, self._network_width)
        record = ConfigRecord(request.model_dump(by_alias=True))
        content = RecordDict({self.configrecord_key: config, FEATURES: record})
        sampled = super().configure_train(server_round, arrays, config, grid)
        nodes = [message.metadata.dst_node_id for message in sampled]
        summed = {self._directory.data(node) for node in self.names} - {""}
        new = [node for node in nodes if node not in self.names]
        missing = [node for node in new if self._directory.data(node) not in summed]
        for node in set(new) - set(missing):
            log(INFO, "Node %d has sent its sums under another id", node)
        return [Message(content, node, TRAIN_SUMS) for node in missing]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the usable sums to those that are there, and solve the head of all."""
        replies = usable(replies)
        if replies and self._secure_sums:
            self._take_in_together(-server_round, replies)
        else:
            self._take_in(replies)
        if not self.sums:
            log(WARNING, "Round %d: no usable sums, the global model stays", server_round)
            return None, None
        return as_record(self._solved(self.start_of_round)), MetricRecord()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have nodes evaluate the model, or with ``personal`` heads of their own."""
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        if not (messages and self.settings.personal and self.sums):
            return messages
        sums = self._total()
        strength = {"regularisation": self._strength(sums)}
        request = self.settings.model_copy(update=strength).model_dump(by_alias=True)
        content = RecordDict({FEATURES: ConfigRecord(request), SUMS: record_of(sums)})
        return [Message(content, m.metadata.dst_node_id, EVALUATE_OWN) for m in messages]

    def forget(self, names: Collection[str], arrays: ArrayRecord) -> ArrayRecord:
        """Take nodes' sums out; return the model that the others alone would have given.

        Raises ValueError if a node has sent none, or no other node's are left.
        """
        if odd := sorted({*names} - {*self.names.values()}):
            known = listed(sorted(self.names.values()))
            raise ValueError(f"{odd[0]!r} is not among the nodes that sent sums ({known})")
        rest = {node: name for node, name in self.names.items() if name not in names}
        if not rest:
            raise ValueError("no other node is left (keep one at least, or delete the run)")
        gone = {*self.names} - {*rest}
        if masked := sorted(self.names[node] for node in gone - {*self.sums}):
            raise ValueError(
                f"the sums of {masked[0]!r} came in a secure sum, and nobody can tell them from "
                "the others' (run again without the node)"
            )
        self.names = rest
        self.sums = {key: sums for key, sums in self.sums.items() if key not in gone}
        return as_record(self._solved(as_arrays(arrays)))

    def _take_in(self, replies: list[Message]) -> None:
        """Take in the usable sums of each node."""
        if replies and not self.names:
            log(INFO, "Sums are not masked: the server sees those of each node")
        known = {*self.grid.get_node_ids(), *(reply.metadata.src_node_id for reply in replies)}
        counting = self._directory.samples(known)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                self.sums[node] = self._read_sums(reply, counting.get(node))
                self.names[node] = self._directory.name(node)
            except ValueError as error:
                self.set_aside(reply, one_line(error))

    def _take_in_together(self, key: int, replies: list[Message]) -> None:
        """Take in a secure sum of nodes, if it is usable: each reply has the mean of all."""
        samples = sum(int(number(reply, NUM_EXAMPLES)) for reply in replies)
        arrays = as_arrays(sent_arrays(replies[0], SUMS))
        sums = sums_of_means(arrays, samples, self.settings, self._noise)
        try:
            if self._noise:
                noise = self._noise * math.sqrt(len(replies))
                sums.check_noisy(samples, self.settings.clip, noise)
            else:
                sums.check(self.settings.clip, whole=False)
        except ValueError as error:
            for reply in replies:
                self.set_aside(reply, f"in the secure sum, {one_line(error)}")
            return
        self.sums[key] = as_arrays(record_of(sums))
        nodes = [reply.metadata.src_node_id for reply in replies]
        self.names |= {node: self._directory.name(node) for node in nodes}

    def _read_sums(self, reply: Message, counting: int | None) -> Arrays:
        """A node's sums, checked, and scaled down if it has more samples than may count.

        Raises ValueError if they do not fit, or no samples have such sums.
        """
        record = sent_arrays(reply, SUMS)
        check_sums(record)
        arrays = as_arrays(record)
        if arrays[BY_CLASS].shape != (self._classes, self._width):
            wanted = f"{self._classes} classes by {self._width} features"
            raise ValueError(f"its sums are of shape {arrays[BY_CLASS].shape}, not {wanted}")
        sums, samples = sums_of(arrays), int(number(reply, NUM_EXAMPLES))
        if self._noise:
            sums.check_noisy(samples, self.settings.clip, self._noise)
        else:
            sums.check(self.settings.clip)
            samples = round(sums.size)
        if counting is None or samples <= counting:
            return arrays
        node = reply.metadata.src_node_id
        log(WARNING, "Node %d sums %d samples: %d count", node, samples, counting)
        factor = counting / samples
        scaled = {name: np.multiply(arrays[name], factor) for name in _SCALED}
        return {**arrays, **scaled}

    def _solved(self, model: Arrays) -> Arrays:
        """The model with the head of all sums."""
        sums = self._total()
        strength = self._strength(sums)
        head = solved(self.settings.head, sums, strength)
        log(
            INFO,
            "Head of %s: %s of %d samples, regularisation %.4g",
            counted(len(self.names), "node"),
            self.settings.head,
            sums.size,
            strength,
        )
        return {**model, **self._arrays(head)}

    def _total(self) -> Sums:
        return reduce(add, map(sums_of, self.sums.values()))  # one node's at a time in memory

    def _strength(self, sums: Sums) -> float:
        """Regularisation of the head."""
        if self.settings.regularisation:
            return self.settings.regularisation
        if self.settings.head == "lda":
            return best_shrinkage(sums)
        if not self._noise:
            return best_penalty(sums)
        of_gram, _, _ = deviations(self.settings.clip, self._noise)
        return noisy_penalty(self._width, of_gram * math.sqrt(len(self.names)))

    def _arrays(self, head: Head) -> Arrays:
        if self._directions is not None:
            head = head.of_projection(self._directions)
        solved = {"weight": head.weight, "bias": head.bias}
        return {f"{self._layer}.{name}": a.astype(np.float32, "C") for name, a in solved.items()}
