"""Auto: a strategy that takes another one, once it has seen how the nodes' labels differ."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from logging import INFO
from random import Random
from statistics import median
from typing import Any, Self

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from protocol.arrays import as_arrays, as_tensors, sent_arrays
from protocol.auto import CANDIDATES, CHOICE
from protocol.hfldd import LABEL_KNOWLEDGE, LabelRequest, soft_labels_of
from protocol.meeting import one_line
from protocol.messages import CONFIG
from protocol.replies import NothingUsableError, set_aside, usable
from strategies.auto.rule import ON_FROZEN, Choice, choose
from strategies.auto.skew import Floats, label_skew, one_class_labels
from strategies.common.directory import Directory
from strategies.common.run import Run
from strategies.common.state import check_tag, tag
from strategies.common.topology import Topology
from task.backbones import Frozen
from task.plugin import import_object
from task.words import counted

MOST_ASKED = 100
"""Nodes whose labels are looked at; how these differ says enough of a thousand."""
FEWEST_ASKED = 2
SAMPLES = 200
"""Without labels, of which nodes send soft labels; only their mean counts."""


class Auto(Strategy):
    """Takes the strategy that does best with labels that differ as much as the nodes' do.

    Before the first round nodes train the initial model for a few steps and send soft labels on
    samples that everybody has, as in HFLDD. These tell how much the nodes' labels differ
    (:func:`strategies.auto.skew.label_skew`). By that, and by how many classes nodes hold, a rule
    names the strategy (:func:`strategies.auto.rule.choose`), which then does everything. Where only
    the head of a frozen network trains, it asks nothing and takes the head in closed form.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    num_classes : int
        Classes of the task.
    auxiliary : Tensor
        Samples without labels that every node builds for itself too.
    create : callable
        Makes a strategy of the run, given its name.
    seed : int (default: 0)
        Seed of the choice of nodes that are asked.
    device : torch.device or str (default: "cpu")
        Where the server computes.
    phase_timeout : float (default: 600.0)
        Seconds to wait for soft labels.
    directory : Directory, optional (default: None)
        Descriptions of known nodes; None starts an empty one.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        num_classes: int,
        auxiliary: Tensor,
        create: Callable[[str], Strategy],
        seed: int = 0,
        device: torch.device | str = "cpu",
        phase_timeout: float = 600.0,
        directory: Directory | None = None,
    ) -> None:
        self.choice: Choice | None = None
        """What it took, and why; None before the first round."""
        self.taken: Strategy | None = None
        self._request = LabelRequest(auxiliary_size=len(auxiliary))
        self._model = model
        self._num_classes = num_classes
        self._auxiliary = auxiliary
        self._create = create
        self._seed = seed
        self._device = device
        self._directory = directory or Directory()
        self._timeout = phase_timeout

    @classmethod
    def from_run(cls, settings: None, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp."""
        request = LabelRequest(auxiliary_size=SAMPLES)
        auxiliary = run.auxiliary(request.auxiliary, request.auxiliary_size, "auto's samples")
        return cls(
            model=run.model,
            num_classes=run.spec.num_classes,
            auxiliary=auxiliary(),
            create=run.create,
            seed=run.seed,
            device=run.device,
            phase_timeout=run.phase_timeout,
            directory=run.directory,
            **arguments,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Take a strategy before the first round; then have it configure the round."""
        if self.taken is None:
            self._take(self._chosen(arrays, grid))
        return self._strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See the strategy that was taken."""
        return self._strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See the strategy that was taken."""
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """See the strategy that was taken."""
        return self._strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what will be asked."""
        log(INFO, "\t├──> Auto takes one of %s", ", ".join(CANDIDATES))

    @property
    def topology(self) -> Topology | None:
        """Clusters of the strategy that was taken, if it has any."""
        return getattr(self.taken, "topology", None)

    def artifacts(self) -> dict[str, bytes]:
        """Files of the run's result: the choice, and those of the strategy that was taken."""
        if self.choice is None:
            return {}
        content = json.dumps(self.choice.as_json(), indent=2).encode()
        files: dict[str, bytes] = getattr(self.taken, "artifacts", dict)()
        return {CHOICE: content, **files}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the choice, and the state of what was taken."""
        if self.choice is None:
            return tag(self)
        state: dict[str, Any] = getattr(self.taken, "state_dict", dict)()
        return {**tag(self), "choice": asdict(self.choice), "of": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises
        ------
        ValueError
            If it belongs to another strategy or version.
        """
        check_tag(state, self)
        self.choice = self.taken = None
        if "choice" in state:
            self._take(Choice(**state["choice"]))
            getattr(self.taken, "load_state_dict", lambda of: None)(state["of"])

    @property
    def _strategy(self) -> Strategy:
        if self.taken is None:
            raise RuntimeError("auto takes a strategy in configure_train, before all else")
        return self.taken

    def _chosen(self, arrays: ArrayRecord, grid: Grid) -> Choice:
        if isinstance(self._model, Frozen) and not self._model.trained:
            return ON_FROZEN
        nodes = sorted(grid.get_node_ids())
        if len(nodes) > MOST_ASKED:
            nodes = Random(self._seed).sample(nodes, MOST_ASKED)
        return choose(self._skew(nodes, arrays, grid), self._held(nodes, grid))

    def _take(self, choice: Choice) -> None:
        log(INFO, "Auto: %s", choice.reason)
        self.choice, self.taken = choice, self._create(choice.strategy)
        self.taken.summary()

    def _held(self, nodes: list[int], grid: Grid) -> float | None:
        """Share of the classes that the median node holds; None if a node does not tell."""
        known = self._directory.look_up(grid, nodes, self._timeout).values()
        held = [len(set(about.classes)) for about in known if about.classes is not None]
        return median(held) / self._num_classes if len(held) == len(nodes) else None

    def _skew(self, nodes: list[int], arrays: ArrayRecord, grid: Grid) -> float:
        """How much the labels of nodes differ."""
        labels = list(self._soft_labels(nodes, grid))
        if len(labels) < min(FEWEST_ASKED, len(nodes)):
            raise NothingUsableError(
                f"{len(labels)} of {counted(len(nodes), 'node')} sent usable soft labels"
            )
        if len(labels) < FEWEST_ASKED:
            return 0.0
        model = copy.deepcopy(self._model).to(self._device)
        model.load_state_dict(as_tensors(as_arrays(arrays)))
        return label_skew(
            labels,
            one_class_labels(
                model,
                self._auxiliary.to(self._device),
                self._num_classes,
                steps=self._request.initial_steps,
                lr=self._request.initial_lr,
                batch_size=self._request.initial_batch_size,
            ),
        )

    def _soft_labels(self, nodes: list[int], grid: Grid) -> Iterable[Floats]:
        """Usable soft labels of nodes."""
        log(INFO, "Auto: asking %s for soft labels", counted(len(nodes), "node"))
        record = RecordDict({CONFIG: ConfigRecord(self._request.model_dump(by_alias=True))})
        messages = [Message(record, node, LABEL_KNOWLEDGE) for node in nodes]
        shape = (len(self._auxiliary), self._num_classes)
        for reply in usable(grid.send_and_receive(messages, timeout=self._timeout)):
            node = reply.metadata.src_node_id
            try:
                labels = soft_labels_of(sent_arrays(reply))
                if labels.shape != shape:
                    raise ValueError(f"its soft labels are {labels.shape}, not {shape}")
            except ValueError as error:
                set_aside(grid, node, LABEL_KNOWLEDGE, one_line(error))
            else:
                yield labels


def formulas(strategy: Auto, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by the formulas of what was taken."""
    path = CANDIDATES[strategy.choice.strategy].formulas if strategy.choice else ""
    if not path:
        return {}
    bits_of: Any = import_object(path)
    bits: dict[str, int] = bits_of(strategy.taken, num_nodes, num_weights, num_rounds)
    return bits
