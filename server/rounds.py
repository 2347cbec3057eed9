"""Runs the rounds under Flower's own loop, with recording and checkpoints."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass
from logging import ERROR, INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_distill.protocol.arrays import not_finite
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import check_config, phases_of
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.server.grid.failures import told
from flwr_distill.server.grid.screening import ScreeningGrid
from flwr_distill.server.record.about import about_run, class_counts
from flwr_distill.server.record.checkpoint import Checkpoint, save_checkpoint
from flwr_distill.server.record.packing import Arrays, pack, unpack
from flwr_distill.server.record.recorder import RunRecorder
from flwr_distill.server.record.resume import (
    OffsetRounds,
    continue_on_nodes,
    load_state,
    offset_evaluate,
    restore,
    state_of,
    way_to_resume,
)
from flwr_distill.server.roster import Roster
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.traffic import fedavg_bits
from flwr_distill.task.plugin import import_object
from flwr_distill.task.settings import SettingsError, TrainSettings
from flwr_distill.task.words import counted

EndOfRound = Callable[[int, ArrayRecord], MetricRecord | None]


START_AGAIN = "the nodes' logs say more; fix them and start the run again"


class NothingLearntError(RuntimeError):
    """Nodes sent nothing usable, so that nothing was learnt; names their reasons."""


@dataclass
class Rounds:
    """Runs a strategy to the last round, from the start or from a checkpoint.

    A strategy `start` makes the model that the first round begins with; without, it is random.

    A round in which nothing was learnt has failed. ``patience-failed`` of them in a row end the run
    with an error, and so does a run of failed rounds alone.
    """

    settings: RunSettings
    run_id: int
    task: Task
    method: Method | None
    strategy: Strategy
    grid: ScreeningGrid
    roster: Roster
    recorder: RunRecorder
    start: Strategy | None = None

    def __post_init__(self) -> None:
        self._model = self._made = self.task.start  # at the end of a round, and in it
        self._failures: list[str] = []  # of the last rounds, in a row
        self._broken: list[str] = []  # what is not finite after the round
        self._personal = self.method is not None and self.method.personal
        self._begun = self._ended = 0  # the last round that began, and that ended
        self._metrics: MetricRecord | None = None  # of the round that ended last
        self.grid.wanted = node_settings(self.strategy) or self.grid.wanted

    def run(self, checkpoint: Checkpoint | None = None) -> None:
        """Run the remaining rounds and write the results.

        If the run fails, the report so far is written before the exception propagates, and the
        model if any round has changed it.
        """
        self._follow_roster()
        done = None
        if checkpoint:
            done, self._model = checkpoint.round, self.task.sent(checkpoint.arrays)
            continue_on_nodes(self.grid, checkpoint, self.roster, self.settings.phase_timeout)
            restore(self.strategy, checkpoint, self.roster)
            self.grid.begin_round(done + 1)
        try:
            if self.start and not checkpoint:
                self._model = self._first_model(self.start)
            arrays = self.learn(done)
        except Exception as error:
            learnt = not self._personal and self._model is not self.task.start
            self.recorder.break_off(error, self.task.whole(self._model) if learnt else None)
            if setting := way_to_resume(self.strategy, self.recorder.folder):
                log(INFO, "To resume from the last checkpoint: %s", setting)
            raise
        self._write_results(arrays)

    def _first_model(self, start: Strategy) -> ArrayRecord:
        """The model after one round of the strategy `start`.

        Raises
        ------
        NothingLearntError
            If there is none.
        """
        log(INFO, "%s makes the model that training starts from", type(start).__name__)
        result = start.start(
            grid=self.grid,
            initial_arrays=self._model,
            num_rounds=1,
            timeout=self.settings.phase_timeout,
            train_config=self.train_config(),
        )
        if not result.arrays:
            reasons = told(self.grid.failures) or "the log says why"
            raise NothingLearntError(
                f"start = {self.settings.start!r} made no model: {reasons} ({START_AGAIN})"
            )
        return result.arrays

    def learn(self, done: int | None) -> ArrayRecord:
        """The model after the rounds that are left; `done` are those before, None if it is new.

        Raises
        ------
        NothingLearntError
            If no round changed it, or too many in a row did not.
        SettingsError
            If a strategy with a loop of its own gives no result, or a key to nodes that they do not
            read.
        """
        strategy = self.strategy
        evaluate: EndOfRound = self._end_once
        if done is None:
            self._metrics = self.end_round(0, self._model)
        else:
            self._begun = self._ended = done
            strategy, evaluate = OffsetRounds(strategy, done), offset_evaluate(done, evaluate)
        rounds, self._made = self.settings.num_rounds - self._ended, self._model
        try:
            self.forget_broken_rounds()
            self._follow_rounds()
            result = strategy.start(
                grid=self.grid,
                initial_arrays=self._model,
                num_rounds=rounds,
                timeout=self.settings.phase_timeout,
                train_config=self.train_config(),
                evaluate_fn=evaluate,
            )
        except NothingUsableError as error:
            reasons = told(self.grid.failures) or "no node gave a reason"
            raise NothingLearntError(f"{error}: {reasons} ({START_AGAIN})") from error
        if not isinstance(result, Result):
            self._end_last(self._made)
            raise SettingsError(
                f"strategy = {self.settings.strategy!r}: {type(self.strategy).__name__}.start "
                f"returned {type(result).__name__}, need Flower's Result with the model (the model "
                "of the last aggregate_train is in the run's folder)"
            )
        self._end_last(result.arrays or self._model)
        if not result.arrays:
            reasons = next(reversed(self._failures), "the strategy made no model of the replies")
            raise NothingLearntError(
                f"nothing was learnt in {counted(rounds, 'round')}: {reasons} ({START_AGAIN})"
            )
        return result.arrays

    def _end_once(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round, unless it has ended; the metrics of the round that ended last.

        It is the `evaluate_fn` of Flower's loop. A loop of the strategy's own may leave that out:
        a round then ends when the next one begins, or with the run.
        """
        if server_round > self._ended:
            self._ended = server_round
            self._metrics = self.end_round(server_round, arrays)
        return self._metrics

    def _end_last(self, arrays: ArrayRecord) -> None:
        """End the last round, with the run's result."""
        if self._begun or arrays is self._model:
            self._end_once(self._begun, arrays)
        else:  # a loop without configure_train, of which only the result is known
            self._end_once(self.settings.num_rounds, arrays)

    def forget_broken_rounds(self) -> None:
        """Have the strategy forget a round after which it or its model holds NaN or infinity."""
        aggregate = self.strategy.aggregate_train

        def aggregate_train(
            server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            before, values = _packed_state(self.strategy)
            values = deepcopy(values)
            arrays, metrics = aggregate(server_round, replies)
            broken = [] if arrays is None else not_finite(arrays)
            self._broken = [f"the new model's {name}" for name in broken]
            if _finite(values) and not _finite(_packed_state(self.strategy)[1]):
                self._broken.append("the strategy's new state")
            if not self._broken:
                self._made = arrays or self._made
                return arrays, metrics
            load_state(self.strategy, unpack(before, values))
            return None, None

        self.strategy.aggregate_train = aggregate_train  # type: ignore[method-assign]

    def _follow_rounds(self) -> None:
        """See each round begin: nodes train with its learning rate, and read all that they get."""
        configure, evaluate = self.strategy.configure_train, self.strategy.configure_evaluate

        def configure_train(
            server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            self._end_once(server_round - 1, arrays)
            self._begun = server_round
            rate = learning_rate(self.settings.train, server_round, self.settings.num_rounds)
            config = ConfigRecord({**config, "lr": rate})
            return _readable(configure(server_round, arrays, config, grid))

        def configure_evaluate(*args: Any, **kwargs: Any) -> Iterable[Message]:
            return _readable(evaluate(*args, **kwargs))

        self.strategy.configure_train = configure_train  # type: ignore[method-assign]
        self.strategy.configure_evaluate = configure_evaluate  # type: ignore[method-assign]

    def end_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round: evaluate, record, meet new nodes, save a checkpoint.

        Raises
        ------
        NothingLearntError
            If it is one failed round too many.
        FilesChangedError
            If the server's data set has changed.
        """
        self.task.check_data(self.settings)
        evaluate = None if self._personal else self.task.evaluate
        metrics = evaluate(server_round, arrays) if evaluate else None
        self.recorder.record_round(server_round, metrics, self._topology())
        if failure := self._failure(arrays) if server_round else "":
            log(ERROR, "Round %d failed: %s", server_round, failure)
        self._failures = [*self._failures, failure] if failure else []
        self._model = arrays
        self.grid.left_out = self.roster.not_due(server_round)
        self.roster.meet_new(self.grid, self.settings.phase_timeout, server_round=server_round)
        self._follow_roster()
        self._save_checkpoint(server_round, arrays)
        if len(self._failures) == self.settings.patience_failed:
            setting = way_to_resume(self.strategy, self.recorder.folder)
            how = f"continue with {setting}" if setting else "start a new run"
            raise NothingLearntError(
                f"{counted(len(self._failures), 'failed round')}, and patience-failed = "
                f"{self.settings.patience_failed}: {failure} (fix the nodes and {how}, or raise "
                "patience-failed)"
            )
        self.grid.begin_round(server_round + 1)
        return metrics

    def _failure(self, arrays: ArrayRecord) -> str:
        """Why the round has failed, with the nodes' reasons; an empty text if it has not."""
        stuck = arrays is self._model
        if stuck and self._broken:
            return f"{self._broken[0]} held NaN or infinity, so it was left out"
        if stuck and not self.grid.answered:
            return "no node was asked to take part"
        barren = [phase for phase, answered in self.grid.answered.items() if not answered]
        needed = {name for name, phase in phases_of(self.method).items() if phase.needed}
        if barren and (stuck or not needed.isdisjoint(barren)):
            what = f"no node sent anything usable for {', '.join(barren)}"
        elif stuck:
            what = "the strategy could use nothing that nodes sent"
        else:
            return ""
        return f"{what}: {told(self.grid.failures) or 'the log says why'}"

    def _topology(self) -> dict[str, Any] | None:
        """The strategy's clusters, with nodes by name; None if it has none."""
        topology = getattr(self.strategy, "topology", None)
        return topology.to_dict(self.roster.names) if topology else None

    def _save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        checkpoint = Checkpoint(
            run_id=self.run_id,
            round=server_round,
            settings=self.settings.model_dump(by_alias=True),
            nodes=self.roster.identities,
            arrays=self.task.whole(arrays),
            state=state_of(self.strategy),
            record={
                **self.recorder.state_dict(),
                "data": self.task.fingerprint,
                "classes": list(self.roster.directory.class_names),
                "scale": asdict(scale) if (scale := self.roster.directory.scale) else None,
            },
            keys=self.roster.keys,
        )
        keep, best = self.settings.keep_checkpoints, self.recorder.best_round
        save_checkpoint(self.recorder.folder, checkpoint, keep, best)

    def train_config(self) -> ConfigRecord:
        """Local training settings, sent with every train message."""
        own = {"holdout", "lr_schedule"}  # a node's own, and the server's
        return ConfigRecord(self.settings.train.model_dump(by_alias=True, exclude=own))

    def _follow_roster(self) -> None:
        """Have grid, journal and about.json agree with the roster."""
        self.recorder.record_data(
            {str(node): about.read for node, about in self.roster.nodes.items()},
            self.task.fingerprint,
        )
        self.grid.order, self.grid.together = self.roster.order, self.roster.together
        self.grid.left_out = self.roster.left_out.keys()
        about = about_run(self.task.spec, self.roster, self.recorder.started, self.task.fingerprint)
        self.recorder.write_json("about.json", about)

    def _write_results(self, arrays: ArrayRecord) -> None:
        counts = class_counts(self.settings, self.task.spec, self.roster)
        self.recorder.write_json("partition.json", counts)
        artifacts: dict[str, bytes] = getattr(self.strategy, "artifacts", dict)()
        model = None if self._personal else self.task.whole(arrays)
        self.recorder.finish(model, self._formula_bytes(arrays), artifacts, self.roster.warnings)

    def _formula_bytes(self, arrays: ArrayRecord) -> dict[str, float]:
        """Cost of the run by the formulas of FedAvg and of the method, in bytes."""
        num_nodes, rounds = len(self.roster.nodes), self.settings.num_rounds
        num_weights = sum(array.numpy().size for array in arrays.values())
        bits = {"fedavg (HFLDD, eq. 3)": fedavg_bits(num_nodes, num_weights, rounds)}
        if self.method and self.method.formulas:
            formulas: Any = import_object(self.method.formulas)
            bits |= formulas(self.strategy, num_nodes, num_weights, rounds)
        for name, size in bits.items():
            log(INFO, "Traffic by formula, %s: %.2f MB", name, size / 8e6)
        return {name: size / 8 for name, size in bits.items()}


def _readable(messages: Iterable[Message]) -> list[Message]:
    """The messages, once it is certain that nodes read all of their configs."""
    messages = list(messages)
    for message in messages:
        check_config(message)
    return messages


def learning_rate(train: TrainSettings, server_round: int, num_rounds: int) -> float:
    """Learning rate of a round, from 1 on; above 0 in the last one too."""
    if train.lr_schedule == "constant":
        return train.lr
    return train.lr * (1 + math.cos(math.pi * (server_round - 1) / num_rounds)) / 2


def node_settings(strategy: Strategy) -> str:
    """The arguments by which one of Flower's strategies waits for nodes, with their values."""
    inner = getattr(strategy, "strategy", strategy)  # of Flower's wrappers
    names = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")
    values = [(name, getattr(inner, name, None)) for name in names]
    return ", ".join(f"{n} = {v}" for n, v in values if isinstance(v, int) and v > 1)


def _packed_state(strategy: Strategy) -> tuple[Any, Arrays]:
    """A strategy's state, as in a checkpoint: an ArrayRecord that was sent cannot be copied."""
    arrays: Arrays = {}
    return pack(state_of(strategy), arrays), arrays


def _finite(arrays: Arrays) -> bool:
    return all(np.isfinite(array).all() for array in arrays.values())
