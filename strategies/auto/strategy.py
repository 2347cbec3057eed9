"""Auto: a strategy that takes another one, once it has seen how the nodes' labels differ."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from logging import INFO
from random import Random
from statistics import median
from typing import Any, Self, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from flwr_distill.base.text import counted
from flwr_distill.protocol.arrays import as_arrays, as_tensors
from flwr_distill.protocol.method import CHOICE
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.auto.method import CANDIDATES
from flwr_distill.strategies.auto.rule import ON_FROZEN, Choice, choose, held_suffices
from flwr_distill.strategies.auto.skew import label_skew, one_class_labels
from flwr_distill.strategies.common.checked import check_tag, tag
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.topology import Topology
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.task.backbones import Frozen
from flwr_distill.task.plugin import import_object

MAX_ASKED = 100
"""Nodes whose labels are looked at; how these differ says enough of a thousand."""
MIN_ASKED = 2
SAMPLES = 200
"""Of the auxiliary set, by whose soft labels nodes are compared; only their mean counts."""


class Auto(Strategy):
    """Takes the strategy that does best with labels that differ as much as the nodes' do.

    Where nodes have most classes, or only the head of a frozen network trains, that decides. Else
    nodes send HFLDD's soft labels before the first round: a few steps on their data move the
    initial model, on samples that everybody has. These show how much the nodes' labels differ
    (:func:`strategies.auto.skew.label_skew`). A rule names the strategy
    (:func:`strategies.auto.rule.choose`), which then does everything. HFLDD forms its clusters by
    the same soft labels.

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    auxiliary : callable
        Maps a name and a size to samples without labels, (size, ...), as nodes make them too.
    create : callable
        Makes a strategy of the run, given its name.
    seed : int (default: 0)
        Seed of the choice of nodes that send soft labels.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        num_classes: int,
        auxiliary: Callable[[str, int], Tensor],
        create: Callable[[str], Strategy],
        seed: int = 0,
        device: torch.device | str = "cpu",
        phase_timeout: float = 600.0,
        directory: Directory | None = None,
    ) -> None:
        self.choice: Choice | None = None
        """What it took, and why; None before the first round."""
        self.taken: Strategy | None = None
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
        return cls(
            model=run.model,
            num_classes=run.spec.num_classes,
            auxiliary=lambda name, size: run.auxiliary(name, size, "hfldd.auxiliary")(),
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
            self._choose(arrays, grid)
        return self._strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy that was taken."""
        return self._strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy that was taken."""
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the strategy that was taken."""
        return self._strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the candidates."""
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
        """Restore the state; ValueError if it is of another strategy or version."""
        check_tag(state, self)
        self.choice = self.taken = None
        if "choice" in state:
            choice = Choice(**state["choice"])
            self._take(choice, self._create(choice.strategy))
            getattr(self.taken, "load_state_dict", lambda of: None)(state["of"])

    @property
    def _strategy(self) -> Strategy:
        if self.taken is None:
            raise RuntimeError("auto takes a strategy in configure_train, before all else")
        return self.taken

    def _choose(self, arrays: ArrayRecord, grid: Grid) -> None:
        if isinstance(self._model, Frozen) and not self._model.trained:
            self._take(ON_FROZEN, self._create(ON_FROZEN.strategy))
            return
        nodes = sorted(grid.get_node_ids())
        if len(nodes) > MAX_ASKED:
            nodes = Random(self._seed).sample(nodes, MAX_ASKED)
        held = self._held(nodes, grid)
        if held_suffices(held):
            choice = choose(None, held)
            self._take(choice, self._create(choice.strategy))
            return
        asking = cast(HFLDD, self._create("hfldd"))
        choice = choose(self._skew(asking, nodes, arrays, grid), held)
        same = choice.strategy == "hfldd"
        self._take(choice, asking if same else self._create(choice.strategy))

    def _take(self, choice: Choice, taken: Strategy) -> None:
        log(INFO, "Auto: %s", choice.reason)
        self.choice, self.taken = choice, taken
        taken.summary()

    def _held(self, nodes: list[int], grid: Grid) -> float | None:
        """Share of the classes that the median node has; None if a node does not say."""
        known = self._directory.look_up(grid, nodes, self._timeout).values()
        held = [len(set(about.classes)) for about in known if about.classes is not None]
        return median(held) / self._num_classes if len(held) == len(nodes) else None

    def _skew(self, asking: HFLDD, nodes: list[int], arrays: ArrayRecord, grid: Grid) -> float:
        """How much the labels of nodes differ."""
        asking.ask_labels(nodes, grid)
        request, labels = asking.settings.label_knowledge, list(asking.labels.values())
        if len(labels) < min(MIN_ASKED, len(nodes)):
            raise NothingUsableError(
                f"{len(labels)} of {counted(len(nodes), 'node')} sent usable soft labels"
            )
        if len(labels) < MIN_ASKED:
            return 0.0
        model = copy.deepcopy(self._model).to(self._device)
        model.load_state_dict(as_tensors(as_arrays(arrays)))
        samples = self._auxiliary(request.auxiliary, request.auxiliary_size)[:SAMPLES]
        return label_skew(
            [each[:SAMPLES] for each in labels],
            one_class_labels(
                model,
                samples.to(self._device),
                self._num_classes,
                steps=request.initial_steps,
                lr=request.initial_lr,
                batch_size=request.initial_batch_size,
            ),
        )


def formulas(strategy: Auto, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by the formulas of what was taken."""
    path = CANDIDATES[strategy.choice.strategy].formulas if strategy.choice else ""
    if not path:
        return {}
    bits_of: Any = import_object(path)
    bits: dict[str, int] = bits_of(strategy.taken, num_nodes, num_weights, num_rounds)
    return bits
