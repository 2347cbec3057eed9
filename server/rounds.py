"""Runs the rounds under Flower's own loop, with recording and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from protocol.method import Method
from server.grid.screening import ScreeningGrid
from server.record.about import about_run, class_counts
from server.record.checkpoint import Checkpoint, save_checkpoint
from server.record.recorder import RunRecorder
from server.record.resume import (
    OffsetRounds,
    continue_on_nodes,
    offset_evaluate,
    restore,
    state_of,
)
from server.roster import Roster
from server.settings import RunSettings
from server.task import Task
from strategies.common.traffic import fedavg_bits
from task.plugin import import_object

EndOfRound = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class Rounds:
    """Runs a strategy to the last round, from the start or from a checkpoint."""

    settings: RunSettings
    run_id: int
    task: Task
    method: Method | None
    strategy: Strategy
    grid: ScreeningGrid
    roster: Roster
    recorder: RunRecorder

    def run(self, checkpoint: Checkpoint | None = None) -> None:
        """Run the remaining rounds and write the results.

        If a round fails, the report so far is written before the exception propagates.
        """
        self.grid.order, self.grid.together = self.roster.order, self.roster.together
        self._write_about()
        done, start, strategy = 0, self.task.start, self.strategy
        evaluate: EndOfRound = self.end_round
        if checkpoint:
            done, start = checkpoint.round, checkpoint.arrays
            continue_on_nodes(self.grid, checkpoint, self.roster, self.settings.phase_timeout)
            restore(strategy, checkpoint, self.roster)
            self.grid.begin_round(done + 1)
            strategy, evaluate = OffsetRounds(strategy, done), offset_evaluate(done, evaluate)
        try:
            result = strategy.start(
                grid=self.grid,
                initial_arrays=start,
                num_rounds=self.settings.num_rounds - done,
                timeout=self.settings.phase_timeout,
                train_config=self._train_config(),
                evaluate_fn=evaluate,
            )
        except Exception:
            self.recorder.break_off()
            raise
        self._write_results(result.arrays or start)

    def end_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round: evaluate, record, meet new nodes, save a checkpoint."""
        evaluate = self.task.evaluate
        metrics = evaluate(server_round, arrays) if evaluate else None
        self.recorder.record_round(server_round, metrics, self._topology())
        if self.roster.meet_new(self.grid, self.settings.phase_timeout):
            self.grid.order = self.roster.order
            self._write_about()
        self._save_checkpoint(server_round, arrays)
        self.grid.begin_round(server_round + 1)
        return metrics

    def _topology(self) -> dict[str, Any] | None:
        """The strategy's clusters, with nodes by name; None if it has none."""
        topology = getattr(self.strategy, "topology", None)
        return topology.to_dict(self.roster.names) if topology else None

    def _save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        checkpoint = Checkpoint(
            run_id=self.run_id,
            round=server_round,
            settings=self.settings.model_dump(by_alias=True),
            nodes=self.roster.names,
            arrays=arrays,
            state=state_of(self.strategy),
            record=self.recorder.state_dict(),
            keys=self.roster.keys,
        )
        keep, best = self.settings.keep_checkpoints, self.recorder.best_round
        save_checkpoint(self.recorder.folder, checkpoint, keep, best)

    def _train_config(self) -> ConfigRecord:
        """Local training settings, sent with every train message."""
        return ConfigRecord(self.settings.train.model_dump(by_alias=True, exclude={"holdout"}))

    def _write_about(self) -> None:
        about = about_run(self.task.spec, self.roster, self.recorder.started)
        self.recorder.write_json("about.json", about)

    def _write_results(self, arrays: ArrayRecord) -> None:
        counts = class_counts(self.settings, self.task.spec, self.roster)
        self.recorder.write_json("partition.json", counts)
        artifacts: dict[str, bytes] = getattr(self.strategy, "artifacts", dict)()
        self.recorder.finish(arrays, self._formula_bytes(arrays), artifacts)

    def _formula_bytes(self, arrays: ArrayRecord) -> dict[str, float]:
        """Cost of the run by the formulas of FedAvg and of the method, in bytes."""
        num_nodes, rounds = len(self.roster.names), self.settings.num_rounds
        num_weights = sum(array.numpy().size for array in arrays.values())
        bits = {"fedavg (eq. 3)": fedavg_bits(num_nodes, num_weights, rounds)}
        if self.method and self.method.formulas:
            formulas: Any = import_object(self.method.formulas)
            bits |= formulas(self.strategy, num_nodes, num_weights, rounds)
        for name, size in bits.items():
            log(INFO, "Traffic by formula, %s: %.2f MB", name, size / 8e6)
        return {name: size / 8 for name, size in bits.items()}
