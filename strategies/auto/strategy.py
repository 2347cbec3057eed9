"""Auto: trains with the strategy that does best on what nodes hold out, and asks again."""

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from logging import INFO, WARNING
from random import Random
from statistics import median
from typing import Any, Self, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from flwr_distill.base.text import counted
from flwr_distill.distill.formation import best_formation
from flwr_distill.protocol.arrays import as_arrays, load_arrays
from flwr_distill.protocol.messages import ARRAYS, CONFIG, SERVER_ROUND
from flwr_distill.protocol.method import CHOICE
from flwr_distill.protocol.replies import NothingUsableError, usable
from flwr_distill.strategies.auto.judge import EVAL_ACCURACY, held_out_accuracy
from flwr_distill.strategies.auto.method import CANDIDATES, AutoSettings
from flwr_distill.strategies.auto.race import Race
from flwr_distill.strategies.auto.rule import ON_FROZEN, Candidates, candidates, held_suffices
from flwr_distill.strategies.auto.skew import label_skew, one_class_labels
from flwr_distill.strategies.common.checked import check_tag, tag
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.topology import Topology
from flwr_distill.strategies.common.waiting import connected_nodes
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.task.backbones import Frozen
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import import_object

MAX_ASKED = 100
"""Nodes whose labels are looked at; how these differ says enough of a thousand."""
MIN_ASKED = 2
SAMPLES = 200
"""Of the auxiliary set, by whose soft labels nodes are compared; only their mean counts."""


class Auto(Strategy):
    """Trains with the strategy that does best on samples that nodes hold out, and asks again.

    How much labels differ, or a frozen network, says which strategies may suit, the likeliest first
    (:func:`strategies.auto.rule.candidates`); FedAvg is always among them. A few times in a run
    each of them trains one round from the best model so far, and nodes evaluate that on the
    samples that they hold out (:class:`strategies.auto.race.Race`). The run continues with the best
    one's model. Without a `budget` the likeliest trains alone.

    Of large images, or where each has few classes, nodes send HFLDD's soft labels before the first
    round: a few steps on their data move the initial model, on samples that everybody has
    (:func:`strategies.auto.skew.label_skew`). HFLDD forms its clusters by the same soft labels.

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    auxiliary : callable
        Maps a name and a size to samples without labels, (size, ...), as nodes make them too.
    create : callable
        Makes a strategy of the run, given its name.
    large_images : bool (default: False)
        Whether all nodes train with HFLDD, unless ``hfldd.heads`` says otherwise.
    budget : int (default: 0)
        Rounds that may be lost in contests, all together; with 0 the likeliest candidate trains.
    num_rounds : int (default: 0)
        Rounds of the run, over which the contests are spread.
    seed : int (default: 0)
        Seed of the choice of nodes that send soft labels, and that evaluate.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        num_classes: int,
        auxiliary: Callable[[str, int], Tensor],
        create: Callable[[str], Strategy],
        large_images: bool = False,
        budget: int = 0,
        num_rounds: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        phase_timeout: float = 600.0,
        directory: Directory | None = None,
    ) -> None:
        self.candidates: Candidates | None = None
        """What may suit, and why; None before the first round."""
        self.race = Race([], [])
        self.strategies: dict[str, Strategy] = {}
        """Of candidates that are left, by name."""
        self._running = ""
        self._best: ArrayRecord | None = None
        """Model to continue from; None where it is that of the last round."""
        self._models: dict[str, ArrayRecord] = {}
        self._bytes: dict[str, int] = {}
        self._counted = 0
        self._grid: Grid | None = None
        self._evaluating: Sequence[int] = ()
        self._classes: Mapping[int, Collection[int]] = {}
        self._model = model
        self._num_classes = num_classes
        self._auxiliary = auxiliary
        self._create = create
        self._large_images = large_images
        self._budget = budget
        self._num_rounds = num_rounds
        self._seed = seed
        self._device = device
        self._directory = directory or Directory()
        self._timeout = phase_timeout

    @classmethod
    def from_run(cls, settings: AutoSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp.

        Raises SettingsError if candidates race, and nodes hold no samples out to compare them by.
        """
        budget = int(settings.budget * run.num_rounds)
        if budget and not run.train.holdout:
            raise SettingsError(
                "strategies are compared on samples that nodes hold out, and train.holdout is 0",
                where="auto.budget",
                value=settings.budget,
                remedy="set train.holdout to 0.1, or auto.budget to 0",
            )
        return cls(
            model=run.model,
            num_classes=run.spec.num_classes,
            auxiliary=lambda name, size: run.auxiliary(name, size, "hfldd.auxiliary")(),
            create=run.create,
            large_images=best_formation(run.seen_spec.shape) > 1,
            budget=budget,
            num_rounds=run.num_rounds,
            seed=run.seed,
            device=run.device,
            phase_timeout=run.phase_timeout,
            directory=run.directory,
            **arguments,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the next candidate configure the round; before the first one, choose them."""
        self._grid = grid
        if self.candidates is None:
            self._line_up(arrays, grid)
        self._count_bytes()
        while True:
            name = self._running = self.race.next
            model = arrays if self._best is None else self._best
            if self.race.contest:
                self._best = model
            try:
                config_of = ConfigRecord(dict(config))
                return self.strategies[name].configure_train(server_round, model, config_of, grid)
            except NothingUsableError as error:
                if len(self.race.left) == 1:
                    raise
                log(WARNING, "Auto: %s cannot train here: %s", name, error)
                self.race.retire(name)
                self._settle()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the candidate that trains this round."""
        arrays, metrics = self._strategy.aggregate_train(server_round, replies)
        if arrays is not None and self.race.contest:
            self._models[self._running] = arrays
        elif arrays is not None:
            self._best = None
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """In a contest have nodes evaluate the candidate's model; else as who leads."""
        if not self.race.contest:
            return self._strategy.configure_evaluate(server_round, arrays, config, grid)
        config = ConfigRecord({**config, SERVER_ROUND: server_round})
        model = self._models.get(self._running, self._best or arrays)
        content = RecordDict({ARRAYS: model, CONFIG: config})
        self._evaluating = self._some_nodes(grid)
        known = self._directory.look_up(grid, self._evaluating, self._timeout)
        self._classes = {node: about.classes or () for node, about in known.items()}
        return [Message(content, node, MessageType.EVALUATE) for node in self._evaluating]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """In a contest note the accuracy, which may end it; else as who leads."""
        if not self.race.contest:
            metrics = self._strategy.aggregate_evaluate(server_round, replies)
            self.race.record(self._running, None)
            self._count_bytes()
            return metrics
        samples = self._directory.samples(self._evaluating)
        accuracy, certainty = held_out_accuracy(usable(replies), samples, self._classes)
        if accuracy is None:
            log(WARNING, "Auto: no node has evaluated round %d, by %s", server_round, self._running)
        self._count_bytes()
        self.race.record(self._running, accuracy, certainty)
        self._settle()
        return None if accuracy is None else MetricRecord({EVAL_ACCURACY: accuracy})

    def summary(self) -> None:
        """Log the strategies that may race."""
        log(INFO, "\t├──> Auto takes one of %s", ", ".join(CANDIDATES))

    @property
    def topology(self) -> Topology | None:
        """Clusters of the strategy that trains, if it has any."""
        return getattr(self.strategies.get(self._running), "topology", None)

    def artifacts(self) -> dict[str, bytes]:
        """Files of the run's result: the choice, and those of the strategy that leads."""
        if self.candidates is None:
            return {}
        files: dict[str, bytes] = getattr(self.strategies[self.race.leader], "artifacts", dict)()
        return {CHOICE: json.dumps(self._choice(), indent=2).encode(), **files}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the race, and the states and models of who is left."""
        if self.candidates is None:
            return tag(self)
        states: dict[str, Any] = {
            name: getattr(strategy, "state_dict", dict)()
            for name, strategy in self.strategies.items()
        }
        return {
            **tag(self),
            "candidates": asdict(self.candidates),
            "race": self.race.state_dict(),
            "running": self._running,
            "bytes": dict(self._bytes),
            "counted": self._counted,
            "models": dict(self._models),
            **({} if self._best is None else {"best": self._best}),
            "states": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; ValueError if it is of another strategy or version."""
        check_tag(state, self)
        self.candidates, self.race, self.strategies = None, Race([], []), {}
        self._running, self._best, self._models, self._bytes, self._counted = "", None, {}, {}, 0
        if "candidates" not in state:
            return
        seen = state["candidates"]
        self.candidates = Candidates(**{**seen, "names": tuple(seen["names"])})
        self.race = Race(**state["race"])
        self._running = state["running"]
        self._bytes, self._counted = dict(state["bytes"]), state["counted"]
        self._models, self._best = dict(state["models"]), state.get("best")
        for name, of_strategy in state["states"].items():
            self.strategies[name] = self._make(name)
            getattr(self.strategies[name], "load_state_dict", lambda of: None)(of_strategy)

    @property
    def _strategy(self) -> Strategy:
        if not self._running:
            raise RuntimeError("auto takes a strategy in configure_train, before all else")
        return self.strategies[self._running]

    def _line_up(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Choose the candidates by what is seen of the nodes, and make them."""
        if isinstance(self._model, Frozen) and not self._model.trained:
            self._start(ON_FROZEN)
            return
        connected_nodes(grid, 1, self._timeout)
        nodes = self._some_nodes(grid)
        held = self._held(nodes, grid)
        if held_suffices(held) and not self._large_images:
            self._start(candidates(None, held))
            return
        asking = cast(HFLDD, self._make("hfldd"))
        try:
            skew: float | None = self._skew(asking, nodes, arrays, grid)
        except NothingUsableError as error:
            if not held_suffices(held):
                raise
            log(WARNING, "Auto: how much labels differ stays unknown: %s", error)
            skew = None
        self._start(candidates(skew, held, all_train=asking.all_train), hfldd=asking)

    def _start(self, chosen: Candidates, **made: Strategy) -> None:
        self.candidates = chosen
        self.race = Race.of(chosen.names, self._budget, self._num_rounds)
        self._bytes = dict.fromkeys(self.race.left, 0)
        self.strategies = {name: made.get(name) or self._make(name) for name in self.race.left}
        log(INFO, "Auto: %s: %s", chosen.reason, " against ".join(self.race.left))
        for strategy in self.strategies.values():
            strategy.summary()

    def _make(self, name: str) -> Strategy:
        strategy = self._create(name)
        if isinstance(strategy, HFLDD) and strategy.settings.heads == "auto":
            one_head = strategy.settings.votes or strategy.settings.refresh_every
            strategy.all_train = self._large_images and not one_head
        return strategy

    def _some_nodes(self, grid: Grid) -> list[int]:
        nodes = sorted(grid.get_node_ids())
        return Random(self._seed).sample(nodes, MAX_ASKED) if len(nodes) > MAX_ASKED else nodes

    def _count_bytes(self) -> None:
        """Book what has passed the server since the last call; a plain grid counts nothing."""
        total = getattr(getattr(self._grid, "ledger", None), "server_bytes", 0)
        if self._running:
            self._bytes[self._running] += total - self._counted
        self._counted = total

    def _settle(self) -> None:
        """After a contest continue with the leader's model, and forget who has left."""
        for name in self.strategies.keys() - set(self.race.left):
            del self.strategies[name]
        if self._models and not self.race.results:
            self._best = self._models.get(self.race.leader, self._best)
            self._models = {}
            log(INFO, "Auto: %s", _ranking(self.race.contests[-1]))

    def _choice(self) -> dict[str, Any]:
        """Content of ``choice.json``."""
        assert self.candidates is not None
        return {
            "strategy": self.race.leader,
            "skew": self.candidates.skew,
            "held": self.candidates.held,
            "reason": self.candidates.reason,
            "contests": self.race.contests,
            "tried": [
                {"strategy": name, "rounds": rounds, "server_bytes": self._bytes[name]}
                for name, rounds in self.race.rounds.items()
            ],
        }

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
        load_arrays(model, as_arrays(arrays))
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


def _ranking(contest: Mapping[str, float | None]) -> str:
    """What came of a contest, for the log."""
    of_all = [
        f"{name} {'was not evaluated' if accuracy is None else f'has {accuracy:.1%}'}"
        for name, accuracy in contest.items()
    ]
    return f"of what nodes hold out, {', '.join(of_all)}: {next(iter(contest))}"


def formulas(strategy: Auto, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits by the formulas of those that have not left, for the rounds that each trained."""
    bits: dict[str, int] = {}
    for name, own in strategy.strategies.items():
        if path := CANDIDATES[name].formulas:
            bits_of: Any = import_object(path)
            bits |= bits_of(own, num_nodes, num_weights, strategy.race.rounds[name])
    return bits
