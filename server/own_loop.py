"""Runs a strategy with its own loop, whose rounds show in the Flower methods that it calls."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_distill.server.aggregation import AggregateTrain
from flwr_distill.strategies.common.answered import has_own_loop
from flwr_distill.task.errors import SettingsError

if TYPE_CHECKING:
    from flwr_distill.server.rounds import Rounds

ConfigureTrain = Callable[[int, ArrayRecord, ConfigRecord, Grid], Iterable[Message]]
"""A strategy's ``configure_train``, and ``configure_evaluate``."""


class Observed(Strategy):
    """Mixin of a strategy's class that reports what the strategy's loop calls."""

    _observer: "OwnLoop"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of training."""
        configure: ConfigureTrain = super().configure_train  # type: ignore[safe-super]
        return self._observer.configure_train(configure, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate training replies."""
        aggregate: AggregateTrain = super().aggregate_train  # type: ignore[safe-super]
        return self._observer.aggregate_train(aggregate, server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next evaluation on nodes."""
        configure: ConfigureTrain = super().configure_evaluate  # type: ignore[safe-super]
        return self._observer.rounds.readable(configure(server_round, arrays, config, grid))


def observed(strategy: type[Strategy]) -> type[Strategy]:
    """A strategy's class, with `Observed` if it has its own loop."""
    if not has_own_loop(strategy):
        return strategy
    names = {name: getattr(strategy, name) for name in ("__module__", "__qualname__", "__doc__")}
    return cast(type[Strategy], type(strategy.__name__, (Observed, strategy), names))


class OwnLoop:
    """The loop of a strategy, whose rounds end as those of a run do.

    A round ends when the strategy evaluates it, else when the next one begins, or with the run.
    """

    def __init__(self, rounds: "Rounds") -> None:
        self.rounds = rounds
        self._started = self._ended = 0  # the last round that began, and that ended
        self._model = rounds.model  # in the round that began last
        self._metrics: MetricRecord | None = None  # of the round that ended last

    def run(self, strategy: Observed) -> ArrayRecord | None:
        """The model after all rounds, None if none changed it; SettingsError without a result."""
        rounds, settings = self.rounds, self.rounds.settings
        strategy._observer = self
        self._metrics = rounds.end_round(0, rounds.model)
        result = strategy.start(
            grid=rounds.grid,
            initial_arrays=rounds.model,
            num_rounds=settings.num_rounds,
            timeout=settings.phase_timeout,
            train_config=rounds.train_config(),
            evaluate_fn=self.evaluate,
        )
        if not isinstance(result, Result):
            self._end_last(self._model)
            raise SettingsError(
                f"{type(strategy).__name__}.start returned {type(result).__name__}, need Flower's "
                "Result with the model",
                where="strategy",
                value=settings.strategy,
                remedy="the model of the last aggregate_train is in the run's folder",
            )
        self._end_last(result.arrays or rounds.model)
        return result.arrays or None

    def configure_train(
        self,
        configure: ConfigureTrain,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Begin a round: the one before ends, unless it has."""
        self.evaluate(server_round - 1, arrays)
        self._started = server_round
        config = ConfigRecord({**config, "lr": self.rounds.learning_rate(server_round)})
        return self.rounds.readable(configure(server_round, arrays, config, grid))

    def aggregate_train(
        self, aggregate: AggregateTrain, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate a round, as rounds of a run do."""
        arrays, metrics = self.rounds.aggregate(server_round, replies, aggregate)
        self._model = arrays or self._model
        return arrays, metrics

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round, unless it has ended; the metrics of the round that ended last."""
        if server_round > self._ended:
            self._ended = server_round
            self._metrics = self.rounds.end_round(server_round, arrays)
        return self._metrics

    def _end_last(self, arrays: ArrayRecord) -> None:
        if self._started or arrays is self.rounds.model:
            self.evaluate(self._started, arrays)
        else:  # a loop without configure_train, of which only the result is known
            self.evaluate(self.rounds.settings.num_rounds, arrays)
