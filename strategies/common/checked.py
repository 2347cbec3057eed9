"""Bases of our strategies: with settings, with state, and FedAvg that rejects malformed replies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_distill.protocol.arrays import (
    Arrays,
    as_arrays,
    model_arrays,
    moved_into_record,
    sent_arrays,
)
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES, TRAIN_LOSS
from flwr_distill.protocol.replies import number, set_aside, usable
from flwr_distill.strategies.common.answered import Answered
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.settings import Block

VERSION = 1
"""Format of strategies' states."""


def tag(strategy: object) -> dict[str, Any]:
    """Start of a strategy's state: its class and the version of the format."""
    return {"strategy": type(strategy).__name__, "version": VERSION}


def check_tag(state: Mapping[str, Any], strategy: object) -> None:
    """Raise ValueError unless a state belongs to this strategy class and version."""
    wanted = (type(strategy).__name__, VERSION)
    found = (state.get("strategy"), state.get("version"))
    if found != wanted:
        raise ValueError(f"need the state of {wanted}, found that of {found}")


class Configured(Strategy):
    """A strategy that keeps the settings of its method.

    A class declares them by an attribute of that name, which has the defaults::

        class Fall(CheckedFedAvg):
            settings: FallSettings = FallSettings()

    ``Fall(by=0.5)`` and ``Fall(settings=FallSettings(by=0.5))`` are the same.

    Parameters
    ----------
    settings : Block, optional (default: None)
        Of the declared class; None takes the defaults.
    **kwargs
        Fields of the settings, which take precedence, and arguments of the next base class.

    Attributes
    ----------
    run_arguments : tuple[str, ...]
        Fields of :class:`strategies.common.run.Run` that the constructor takes.

    Raises
    ------
    SettingsError
        If a field is of the wrong type or out of range; names it.
    """

    settings: Any = Block()
    run_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, settings: Block | None = None, **kwargs: Any) -> None:
        name, declared = type(self).__name__, type(type(self).settings)
        self.settings = settings or type(self).settings
        if not isinstance(self.settings, declared):
            found = type(self.settings).__name__
            raise TypeError(f"{name}: settings must be {declared.__name__}, got {found}")
        fields = type(self.settings).model_fields.items()
        own = {field.alias or key: kwargs.pop(key) for key, field in fields if key in kwargs}
        if own:
            values = {**self.settings.model_dump(by_alias=True), **own}
            self.settings = type(self.settings).checked(values, name)
        super().__init__(**kwargs)

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; `arguments` take precedence."""
        own = settings.model_dump() if settings else {}
        from_run = {name: getattr(run, name) for name in cls.run_arguments}
        return cls(**{**run.sampling, **from_run, **own, **arguments})


@dataclass(frozen=True)
class Update:
    """A node's trained model."""

    node: int
    """Flower's node id."""
    num_examples: float
    """n_i, samples that it trained on; > 0."""
    loss: float | None
    """Mean training loss; None with differential privacy."""
    arrays: Arrays
    """Its model, with the global model's names, shapes and types, all finite; or what else
    `CheckedFedAvg.sent` reads."""
    reply: Message


class CheckedFedAvg(Configured, Answered, FedAvg):
    """FedAvg, but malformed replies are logged and rejected, and the round continues.

    A round without usable replies does not change the global model or the strategy's state.

    Attributes
    ----------
    state_keys : tuple[str, ...]
        Attributes, each a mapping, to save in checkpoints.
    start_of_round : Mapping[str, ndarray]
        The global model at the start of the round.
    server_round : int
        The round.
    grid : Grid
        Where the round's messages go.
    num_nodes : int
        Nodes connected at the start of the round.
    """

    state_keys: ClassVar[tuple[str, ...]] = ()
    start_of_round: Arrays
    server_round: int
    grid: Grid
    num_nodes: int

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train, as FedAvg does; each message gets `records` too."""
        self.start_of_round, self.server_round, self.grid = as_arrays(arrays), server_round, grid
        self.num_nodes = len(list(grid.get_node_ids()))
        messages = list(super().configure_train(server_round, arrays, config, grid))
        records = self.records()
        for message in messages:
            message.content.update(records)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the usable models."""
        updates = []
        for reply in usable(replies):
            try:
                updates.append(self.read(reply))
            except ValueError as error:
                self.set_aside(reply, one_line(error))
        if not updates:
            log(WARNING, "Round %d: no usable model, the global one stays", server_round)
            return None, None
        losses = [(u.num_examples, u.loss) for u in updates if u.loss is not None]
        total = sum(num_examples for num_examples, _ in losses)
        metrics = MetricRecord()
        if losses:
            metrics[TRAIN_LOSS] = sum(n * loss for n, loss in losses) / total
        return moved_into_record(dict(self.combine(updates))), metrics

    def records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Records to add to train messages, by name."""
        return {}

    def read(self, reply: Message) -> Update:
        """Read and check a reply; ValueError says why it is unusable."""
        num_examples = number(reply, NUM_EXAMPLES)
        if num_examples <= 0:
            raise ValueError(f"it was trained on {num_examples} samples")
        metrics = reply.content.metric_records[METRICS]
        return Update(
            node=reply.metadata.src_node_id,
            num_examples=num_examples,
            loss=number(reply, TRAIN_LOSS) if TRAIN_LOSS in metrics else None,
            arrays=self.sent(reply),
            reply=reply,
        )

    def sent(self, reply: Message) -> Arrays:
        """Arrays of a reply that are combined: the node's model; ValueError if unusable."""
        return model_arrays(sent_arrays(reply), self.start_of_round)

    def combine(self, updates: list[Update]) -> Arrays:
        """Make the next global model from at least one update."""
        return weighted_mean((update.num_examples, update.arrays) for update in updates)

    def set_aside(self, reply: Message, reason: str) -> None:
        """Say that a reply does not count, in log and journal."""
        set_aside(self.grid, reply.metadata.src_node_id, reply.metadata.message_type, reason)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        state = {key: dict(getattr(self, key)) for key in self.state_keys}
        return {**tag(self), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; ValueError if it is of another strategy or version."""
        check_tag(state, self)
        for key in self.state_keys:
            setattr(self, key, dict(state[key]))


class RobustFedAvg(CheckedFedAvg):
    """CheckedFedAvg in which a robust strategy can replace the weighted mean.

    Parameters
    ----------
    aggregator : Strategy, optional (default: None)
        Gets the models of a round's usable replies, with their numbers of samples:
        :class:`strategies.agreement.Agreement`, :class:`flwr.serverapp.strategy.Krum`,
        ``FedTrimmedAvg``, ``FedMedian`` or similar. None takes the mean weighted by samples.
    **kwargs
        Those of Flower's FedAvg.
    """

    run_arguments: ClassVar[tuple[str, ...]] = ("aggregator",)

    def __init__(self, *, aggregator: Strategy | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.aggregator = aggregator
        self._server_round = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the usable models."""
        self._server_round = server_round
        return super().aggregate_train(server_round, replies)

    def combine(self, updates: list[Update]) -> Arrays:
        """Have the aggregator combine the models, or take their weighted mean."""
        if self.aggregator is None:
            return super().combine(updates)
        if isinstance(self.aggregator, CheckedFedAvg):
            self.aggregator.start_of_round, self.aggregator.grid = self.start_of_round, self.grid
            return self.aggregator.combine(updates)
        replies = [_plain_reply(update) for update in updates]
        record, _ = self.aggregator.aggregate_train(self._server_round, replies)
        if record is None:
            return self.start_of_round
        return {
            name: array.astype(self.start_of_round[name].dtype)
            for name, array in as_arrays(record).items()
        }


def _plain_reply(update: Update) -> Message:
    """Model and number of samples only, in new records, since some Flower strategies empty them."""
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(dict(update.reply.content.array_records[ARRAYS])),
            METRICS: MetricRecord({NUM_EXAMPLES: update.num_examples}),
        }
    )
    return Message(content, update.node, MessageType.TRAIN)
