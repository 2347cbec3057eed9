"""FedAvg that sets aside what cannot be averaged; baselines differ in how models are combined."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from protocol.arrays import Arrays, as_arrays, as_record, model_arrays, sent_arrays
from protocol.averages import weighted_mean
from protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES, TRAIN_LOSS
from protocol.replies import number, usable
from strategies.common.run import Run
from strategies.common.state import check_tag, tag


@dataclass(frozen=True)
class Update:
    """What a node made of the global model.

    Parameters
    ----------
    node : int
        Flower's node id.
    num_examples : float
        n_i, samples that it trained on; > 0.
    loss : float or None
        Mean loss of its training; with differential privacy a node does not tell it.
    arrays : Mapping[str, ndarray]
        Its model, of the global model's names, shapes and types, all finite.
    reply : Message
        With whatever else it sent.
    """

    node: int
    num_examples: float
    loss: float | None
    arrays: Arrays
    reply: Message


class CheckedFedAvg(FedAvg):
    """FedAvg, but a malformed reply is set aside with a line in the log and the round goes on.

    A round without a usable reply leaves the global model and the strategy's state as they are.

    Attributes
    ----------
    run_arguments : tuple[str, ...]
        What of a :class:`strategies.common.run.Run` the constructor takes.
    state_keys : tuple[str, ...]
        Attributes, each a mapping, that last over rounds.
    start_of_round : Mapping[str, ndarray]
        The global model that the round began with.
    num_nodes : int
        Nodes connected as the round began.
    """

    run_arguments: ClassVar[tuple[str, ...]] = ()
    state_keys: ClassVar[tuple[str, ...]] = ()
    start_of_round: Arrays
    num_nodes: int

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp.

        Parameters
        ----------
        settings : Block, optional
            Of the method; the constructor takes them by name.
        run : Run
            The run.
        **arguments
            Further arguments of the constructor, which win.
        """
        own = settings.model_dump() if settings else {}
        of_run = {name: getattr(run, name) for name in cls.run_arguments}
        return cls(**{**run.sampling, **of_run, **own, **arguments})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train, as FedAvg does; each message gets `records` too."""
        self.start_of_round = as_arrays(arrays)
        self.num_nodes = len(list(grid.get_node_ids()))
        messages = list(super().configure_train(server_round, arrays, config, grid))
        records = self.records()
        for message in messages:
            message.content.update(records)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the models that came whole."""
        updates = []
        for reply in usable(replies):
            try:
                updates.append(self.read(reply))
            except ValueError as error:
                log(WARNING, "Model of node %d set aside: %s", reply.metadata.src_node_id, error)
        if not updates:
            log(WARNING, "Round %d: no usable model, the global one stays", server_round)
            return None, None
        losses = [(u.num_examples, u.loss) for u in updates if u.loss is not None]
        total = sum(num_examples for num_examples, _ in losses)
        metrics = MetricRecord()
        if losses:
            metrics[TRAIN_LOSS] = sum(n * loss for n, loss in losses) / total
        return as_record(self.combine(updates)), metrics

    def records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Give what joins a train message, by name."""
        return {}

    def read(self, reply: Message) -> Update:
        """Read and check a reply.

        Raises
        ------
        ValueError
            If it is not usable; the text says why.
        """
        num_examples = number(reply, NUM_EXAMPLES)
        if num_examples <= 0:
            raise ValueError(f"it was trained on {num_examples} samples")
        metrics = reply.content.metric_records[METRICS]
        return Update(
            node=reply.metadata.src_node_id,
            num_examples=num_examples,
            loss=number(reply, TRAIN_LOSS) if TRAIN_LOSS in metrics else None,
            arrays=model_arrays(sent_arrays(reply), self.start_of_round),
            reply=reply,
        )

    def combine(self, updates: list[Update]) -> Arrays:
        """Make the next global model of at least one update."""
        return weighted_mean((update.num_examples, update.arrays) for update in updates)

    def state_dict(self) -> dict[str, Any]:
        """What the strategy needs to go on after a restart, besides the global model."""
        kept = {key: dict(getattr(self, key)) for key in self.state_keys}
        return {**tag(self), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises
        ------
        ValueError
            If it is another strategy's or another version's.
        """
        check_tag(state, self)
        for key in self.state_keys:
            setattr(self, key, dict(state[key]))


class RobustFedAvg(CheckedFedAvg):
    """CheckedFedAvg in which a robust strategy can take the place of the weighted mean.

    Parameters
    ----------
    aggregator : Strategy, optional (default: None)
        Gets the models of a round's usable replies, with their numbers of samples:
        :class:`flwr.serverapp.strategy.Krum`, ``FedTrimmedAvg``, ``FedMedian`` or the like. If
        None, the mean weighted by samples.
    **kwargs
        As Flower's FedAvg takes them.
    """

    run_arguments: ClassVar[tuple[str, ...]] = ("aggregator",)

    def __init__(self, *, aggregator: Strategy | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.aggregator = aggregator
        self._server_round = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the models that came whole."""
        self._server_round = server_round
        return super().aggregate_train(server_round, replies)

    def combine(self, updates: list[Update]) -> Arrays:
        """Have the aggregator combine the models, or take their weighted mean."""
        if self.aggregator is None:
            return super().combine(updates)
        replies = [_plain_reply(update) for update in updates]
        record, _ = self.aggregator.aggregate_train(self._server_round, replies)
        if record is None:
            return self.start_of_round
        return {
            name: array.astype(self.start_of_round[name].dtype)
            for name, array in as_arrays(record).items()
        }


def _plain_reply(update: Update) -> Message:
    """What Flower's strategies take: a model and its number of samples, and nothing else.

    The records are new ones, since some strategies empty those that they are given.
    """
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(dict(update.reply.content.array_records[ARRAYS])),
            METRICS: MetricRecord({NUM_EXAMPLES: update.num_examples}),
        }
    )
    return Message(content, update.node, MessageType.TRAIN)
