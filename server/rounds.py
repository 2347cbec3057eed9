"""Runs the rounds: meet, configure, train, aggregate, evaluate, record, checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from flwr_distill.base.text import counted
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.coded import version_of
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import check_config, phases_of
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.server.aggregation import AggregateTrain, aggregate_finite
from flwr_distill.server.auto_codecs import auto_codecs_of
from flwr_distill.server.grid.failures import reasons_text
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.hooks import Hook, RoundEnd, RunEnd, RunStart
from flwr_distill.server.own_loop import Observed, OwnLoop
from flwr_distill.server.record.about import FILE, about_run, class_counts, earlier_names
from flwr_distill.server.record.checkpoint import Checkpoint
from flwr_distill.server.record.frozen import load_frozen, save_frozen
from flwr_distill.server.record.history import History
from flwr_distill.server.record.journal import Journal
from flwr_distill.server.record.recorder import write_json
from flwr_distill.server.record.resume import (
    continue_on_nodes,
    ids_of_returned,
    restore,
    state_of,
    way_to_resume,
)
from flwr_distill.server.record.writing import results_in
from flwr_distill.server.roster import Roster
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.traffic import fedavg_bits
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.plugin import import_object
from flwr_distill.task.settings import TrainSettings

START_AGAIN = "the nodes' logs say more; fix them and start the run again"


class NothingLearntError(ReportedError):
    """Nodes sent nothing usable, so that nothing was learnt."""


@dataclass
class Rounds:
    """Runs a strategy to the last round, from the start or from a checkpoint.

    A strategy `start` makes the model of the first round; without one, it is random.

    A round in which nothing was learnt has failed. ``patience-failed`` of them in a row end the run
    with an error, and so do failed rounds alone.
    """

    settings: RunSettings
    run_id: int
    folder: Path
    task: Task
    method: Method | None
    strategy: Strategy
    grid: RunGrid
    roster: Roster
    history: History
    journal: Journal
    hooks: Hook
    start: Strategy | None = None

    def __post_init__(self) -> None:
        self.model = self.task.start
        """At the end of the last round."""
        self._about: dict[str, Any] = {}
        self._earlier: dict[str, str] = {}
        self._failures: list[str] = []  # of the last rounds, in a row
        self._broken: tuple[str, ...] = ()  # names of results that are not finite
        self._personal = self.method is not None and self.method.outcome == "personal"
        self._auto_codecs = auto_codecs_of(
            self.settings, self.grid.transport.codec, personal=self._personal
        )
        self.grid.nodes.wanted = node_settings(self.strategy) or self.grid.nodes.wanted

    def run(self, checkpoint: Checkpoint | None = None) -> None:
        """Run the remaining rounds; hooks write the results, and see an error before the caller."""
        self._earlier = earlier_names(self.folder) if checkpoint else {}
        self._follow_roster()
        done = None
        if checkpoint:
            self.task.check_frozen(load_frozen(self.folder))
            done, self.model = checkpoint.round, checkpoint.arrays
            continue_on_nodes(self.grid, checkpoint, self.roster, self.settings.phase_timeout)
            restore(self.strategy, checkpoint, self.roster)
            returned = ids_of_returned(checkpoint, self.roster)
            self.grid.transport.codec.load_state_dict(checkpoint.record["codec"], returned)
            self.grid.load_state_dict(checkpoint.record["grid"], returned)
            if self._auto_codecs:
                self._auto_codecs.load_state_dict(checkpoint.record["auto-codecs"])
            self.grid.begin_round(done + 1)
        else:
            save_frozen(self.folder, self.task.frozen)
        try:
            with results_in(self.folder, way_to_resume(self.strategy, self.folder)):
                self.hooks.on_run_start(self._run_start())
                if self.start and not checkpoint:
                    self.model = self._first_model(self.start)
                arrays = self.learn(done)
                self.hooks.on_run_end(self._run_end(arrays))
        except Exception as error:
            learnt = not self._personal and self.model is not self.task.start
            self.hooks.on_failure(error, self.task.whole(self.model) if learnt else None)
            setting = way_to_resume(self.strategy, self.folder)
            if setting and self.settings.num_rounds:
                log(INFO, "To resume from the last checkpoint: %s", setting)
            raise

    def _first_model(self, start: Strategy) -> ArrayRecord:
        """The model after one round of the strategy `start`; NothingLearntError without any."""
        log(INFO, "%s makes the model that training starts from", type(start).__name__)
        result = start.start(
            grid=self.grid,
            initial_arrays=self.model,
            num_rounds=1,
            timeout=self.settings.phase_timeout,
            train_config=self.train_config(),
        )
        if not result.arrays:
            reasons = reasons_text(self.grid.failures) or "the log says why"
            raise NothingLearntError(
                f"made no model: {reasons}",
                where="start",
                value=self.settings.start,
                remedy=START_AGAIN,
            )
        return result.arrays

    def learn(self, done: int | None) -> ArrayRecord:
        """The model after the rounds that are left; `done` is the last one before, None if new.

        Raises NothingLearntError if no round changed it, or too many in a row did not.
        """
        arrays: ArrayRecord | None
        try:
            if self.settings.statistics:
                self.end_round(0, arrays := self.model)
            elif self.settings.evaluate.model:
                arrays = self._evaluated()
            elif isinstance(self.strategy, Observed):
                arrays = OwnLoop(self).run(self.strategy)
            else:
                arrays = self._loop(done)
        except NothingUsableError as error:
            reasons = reasons_text(self.grid.failures) or "no node gave a reason"
            raise NothingLearntError(f"{error}: {reasons}", remedy=START_AGAIN) from error
        if arrays is None:
            rounds = self.settings.num_rounds - (done or 0)
            reasons = next(reversed(self._failures), "the strategy made no model of the replies")
            problem = f"nothing was learnt in {counted(rounds, 'round')}: {reasons}"
            raise NothingLearntError(problem, remedy=START_AGAIN)
        return arrays

    def _loop(self, done: int | None) -> ArrayRecord | None:
        """The rounds of Flower's ``Strategy.start``; gives the last model, None without any."""
        strategy, timeout = self.strategy, self.settings.phase_timeout
        log(INFO, "Starting %s strategy:", type(strategy).__name__)
        strategy.summary()
        if done is None:
            self.end_round(0, self.model)
        arrays = self.model
        learnt = arrays if done and self._has_learnt() else None
        for server_round in range((done or 0) + 1, self.settings.num_rounds + 1):
            config = self.train_config(server_round)
            messages = strategy.configure_train(server_round, arrays, config, self.grid)
            replies = self.grid.send_and_receive(self.readable(messages), timeout=timeout)
            model, metrics = self.aggregate(server_round, replies)
            if model is not None:
                learnt = arrays = model
            _log_metrics("train", metrics)
            self._evaluate_on_nodes(server_round, arrays)
            self.end_round(server_round, arrays)
        return learnt

    def _has_learnt(self) -> bool:
        """Whether the run that this one resumes has changed the model that it began with."""
        return version_of(as_arrays(self.model)) != version_of(as_arrays(self.task.start))

    def _evaluate_on_nodes(self, server_round: int, arrays: ArrayRecord) -> bool:
        """Have the strategy's nodes evaluate a model; whether any has."""
        strategy, timeout = self.strategy, self.settings.phase_timeout
        messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), self.grid)
        replies = self.grid.send_and_receive(self.readable(messages), timeout=timeout)
        _log_metrics("evaluate", strategy.aggregate_evaluate(server_round, replies))
        return any(reply.has_content() for reply in replies)

    def _evaluated(self) -> ArrayRecord:
        """The model that the run evaluates, once it has; NothingUsableError if no node did."""
        self._warn_of_training_samples(Path(self.settings.evaluate.model))
        if not self._evaluate_on_nodes(0, self.model):
            raise NothingUsableError("no node has evaluated the model")
        self.end_round(0, self.model)
        return self.model

    def _warn_of_training_samples(self, evaluated: Path) -> None:
        from flwr_distill.server.export.evaluated import unlike_training  # here: imports onnx

        if not evaluated.is_dir():
            return
        samples = {
            self.roster.names[node]: about.num_examples for node, about in self.roster.nodes.items()
        }
        if problem := unlike_training(evaluated, self.settings.model_dump(by_alias=True), samples):
            self.roster.warnings.append(problem)
            log(WARNING, "evaluate.model: %s", problem)

    def aggregate(
        self,
        server_round: int,
        replies: Iterable[Message],
        aggregate: AggregateTrain | None = None,
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model of a round's replies, and their metrics; None if it is not finite.

        `aggregate` is by default the strategy's ``aggregate_train``.
        """
        aggregate = aggregate or self.strategy.aggregate_train
        result = aggregate_finite(self.strategy, aggregate, server_round, replies)
        self._broken = result.broken
        return result.arrays, result.metrics

    def end_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round: evaluate, record, meet new nodes, save a checkpoint.

        Raises NothingLearntError if too many rounds in a row failed, and FilesChangedError if the
        server's data set has changed.
        """
        self.task.check_data(self.settings)
        evaluate = None if self._personal else self.task.evaluate
        metrics = evaluate(server_round, arrays) if evaluate else None
        failure = self._failure(arrays) if server_round else ""
        topology = self._topology()
        row = self.history.end_round(server_round, metrics, topology)
        model = None if self._personal else arrays
        self._choose_codecs(server_round, arrays)
        self.model = arrays  # before the row: an export of a run that fails goes by rows
        self.hooks.on_round_end(RoundEnd(row, model, topology, failure))
        if failure:
            log(ERROR, "Round %d failed: %s", server_round, failure)
        self._failures = [*self._failures, failure] if failure else []
        self.grid.nodes.excluded = self.roster.not_due(server_round)
        self.roster.meet_new(self.grid, self.settings.phase_timeout, server_round=server_round)
        self._follow_roster()
        self.hooks.on_checkpoint(self._checkpoint(server_round, arrays))
        if len(self._failures) == self.settings.patience_failed:
            setting = way_to_resume(self.strategy, self.folder)
            how = f"continue with {setting}" if setting else "start a new run"
            raise NothingLearntError(
                f"{counted(len(self._failures), 'failed round')}: {failure}",
                where="patience-failed",
                value=self.settings.patience_failed,
                remedy=f"fix the nodes and {how}, or raise patience-failed",
            )
        self.grid.begin_round(server_round + 1)
        return metrics

    def _choose_codecs(self, server_round: int, arrays: ArrayRecord) -> None:
        """Check codecs after a round, where the run chooses them; the journal has the choice."""
        if self._auto_codecs:
            before = self.model
            choice = self._auto_codecs.end_round(server_round, before, arrays, self.grid)
            if choice:
                self.journal.book_codecs(choice)

    def _failure(self, arrays: ArrayRecord) -> str:
        """Why the round has failed, with the nodes' reasons; empty if it has not."""
        stuck = arrays is self.model
        if stuck and self._broken:
            return f"{self._broken[0]} had NaN or infinity, so it was rejected"
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
        return f"{what}: {reasons_text(self.grid.failures) or 'the log says why'}"

    def _topology(self) -> dict[str, Any] | None:
        """The strategy's clusters, with nodes by name; None if it has none."""
        topology = getattr(self.strategy, "topology", None)
        return topology.to_dict(self.roster.names) if topology else None

    def _checkpoint(self, server_round: int, arrays: ArrayRecord) -> Checkpoint:
        auto = {"auto-codecs": self._auto_codecs.state_dict()} if self._auto_codecs else {}
        return Checkpoint(
            run_id=self.run_id,
            round=server_round,
            settings=self.settings.model_dump(by_alias=True),
            nodes=self.roster.identities,
            arrays=arrays,
            state=state_of(self.strategy),
            record={
                **self.history.state_dict(),
                "data": self.task.fingerprint,
                "codec": self.grid.transport.codec.state_dict(),
                "grid": self.grid.state_dict(),
                **auto,
                "classes": list(self.roster.directory.class_names),
                "scale": asdict(scale) if (scale := self.roster.directory.scale) else None,
            },
            keys=self.roster.keys,
        )

    def train_config(self, server_round: int | None = None) -> ConfigRecord:
        """Local training settings, sent with every train message; by default of no round yet."""
        # Nodes read these in the run config, or nobody does.
        own = {"holdout", "on", "lr_schedule", "class_weights"}
        config = ConfigRecord(self.settings.train.model_dump(by_alias=True, exclude=own))
        if server_round is not None:
            config["lr"] = self.learning_rate(server_round)
        return config

    def learning_rate(self, server_round: int) -> float:
        """Of a round of this run."""
        return learning_rate(self.settings.train, server_round, self.settings.num_rounds)

    @staticmethod
    def readable(messages: Iterable[Message]) -> list[Message]:
        """The messages; SettingsError if nodes do not read a key of a config."""
        messages = list(messages)
        for message in messages:
            check_config(message)
        return messages

    def _follow_roster(self) -> None:
        self.journal.book_data(
            {str(node): about.read for node, about in self.roster.nodes.items()},
            self.task.fingerprint,
        )
        self.grid.nodes.order = self.roster.order
        self.grid.transport.together = self.roster.together
        self.grid.transport.codec.meet(self.roster.names, self.roster.with_codecs)
        if self._auto_codecs:
            self._auto_codecs.meet(self.roster)
        self.grid.transport.notices.add(self.roster.notices)
        self.grid.nodes.excluded = self.roster.excluded.keys()
        started, data = self.history.started, self.task.fingerprint
        about = about_run(self.task.spec, self.roster, started, data, self._earlier)
        if about != self._about:
            write_json(self.folder / FILE, about)
            self._about = about

    def _run_start(self) -> RunStart:
        settings = self.settings.model_dump(by_alias=True)
        rows = tuple(self.history.rows)
        return RunStart(self.run_id, self.folder, settings, self.roster.names, rows)

    def _run_end(self, arrays: ArrayRecord) -> RunEnd:
        artifacts: dict[str, bytes] = getattr(self.strategy, "artifacts", dict)()
        has_model = self.settings.num_rounds > 0 and not self._personal
        return RunEnd(
            model=self.task.whole(arrays) if has_model else None,
            formula_bytes=self._formula_bytes(arrays),
            artifacts=artifacts,
            warnings=self.roster.warnings,
            partition=class_counts(self.settings, self.task.spec, self.roster),
        )

    def _formula_bytes(self, arrays: ArrayRecord) -> dict[str, float]:
        """Cost of the run by the formulas of FedAvg and of the method, in bytes."""
        num_nodes, rounds = len(self.roster.nodes), self.settings.num_rounds
        if not rounds:
            return {}  # formulas are of training
        num_weights = sum(math.prod(array.shape) for array in arrays.values())
        bits = {"fedavg (HFLDD, eq. 3)": fedavg_bits(num_nodes, num_weights, rounds)}
        if self.method and self.method.formulas:
            formulas: Any = import_object(self.method.formulas)
            bits |= formulas(self.strategy, num_nodes, num_weights, rounds)
        for name, size in bits.items():
            log(INFO, "Traffic by formula, %s: %.2f MB", name, size / 8e6)
        return {name: size / 8 for name, size in bits.items()}


def _log_metrics(phase: str, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        log(INFO, "\t└──> Aggregated MetricRecord of %s: %s", phase, metrics)


def learning_rate(train: TrainSettings, server_round: int, num_rounds: int) -> float:
    """Learning rate of a round, from 1 on; above 0 in the last one too."""
    if train.lr_schedule == "constant":
        return train.lr
    return train.lr * (1 + math.cos(math.pi * (server_round - 1) / num_rounds)) / 2


def node_settings(strategy: Strategy) -> str:
    """The arguments by which a Flower strategy waits for nodes, with their values."""
    inner = getattr(strategy, "strategy", strategy)  # of Flower's wrappers
    names = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")
    values = [(name, getattr(inner, name, None)) for name in names]
    return ", ".join(f"{n} = {v}" for n, v in values if isinstance(v, int) and v > 1)
