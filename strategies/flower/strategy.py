"""Flower's strategies, fitted to our nodes and to models that hold more than weights.

A model with BatchNorm also holds running statistics, and counts of batches, as whole numbers.
Flower's rules treat them as weights: a server optimizer makes variances negative, and in the length
of an update a count outweighs everything else. The classes here have Flower's names; each applies
Flower's rule to the arrays that it is meant for.
"""

from collections.abc import Collection, Iterable
from logging import WARNING
from statistics import median
from typing import Any, Self

import flwr.serverapp.strategy as flower
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_distill.protocol.arrays import (
    Arrays,
    RecordArrays,
    as_arrays,
    as_record,
    sent_arrays,
    trained_names,
)
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES, TRAIN_LOSS
from flwr_distill.protocol.replies import number, usable
from flwr_distill.strategies.common.answered import Answered
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError

FAR_LOSS = 10.0
"""Times the median, or its part, that the loss of a node may count as."""


class _OnPart(Answered, FedAvg):
    """Applies Flower's rule to some arrays of the models; the others are averaged by samples."""

    def _of_rule(self, record: ArrayRecord) -> Collection[str]:
        """Names of the arrays that the rule is for: here all but whole numbers."""
        return [name for name, array in record.items() if array.dtype.startswith("float")]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies' models; names, order and types stay."""
        replies = usable(replies)
        if not replies:
            return None, None
        types = {name: array.dtype for name, array in sent_arrays(replies[0]).items()}
        of_rule = set(self._of_rule(sent_arrays(replies[0])))
        others = types.keys() - of_rule
        averaged = _mean_of(others, replies) if others else {}
        for reply in replies:
            reply.content[ARRAYS] = _part(sent_arrays(reply), of_rule)
        record, metrics = super().aggregate_train(server_round, replies)
        if record is None:
            return None, metrics
        arrays = {**as_arrays(record), **averaged}
        return as_record({name: arrays[name].astype(types[name]) for name in types}), metrics


class _OnWeights(_OnPart):
    """Applies Flower's rule, the step of an optimizer at the server, to the trained arrays.

    Parameters
    ----------
    trained : collection of str, optional (default: None)
        Names of the model's trained arrays; None means all but whole numbers.
    **kwargs
        Those of Flower's class.
    """

    def __init__(self, *, trained: Collection[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trained = trained

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`."""
        own = {**cls._from_run(run), **settings.model_dump(), **arguments}
        return cls(**{**run.sampling, "trained": trained_names(run.model), **own})

    @classmethod
    def _from_run(cls, run: Run) -> dict[str, Any]:
        return {}

    def _of_rule(self, record: ArrayRecord) -> Collection[str]:
        return super()._of_rule(record) if self.trained is None else self.trained

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round; nodes get the whole model, and the rule remembers its part."""
        part = _part(arrays, self._of_rule(arrays))
        messages = list(super().configure_train(server_round, part, config, grid))
        for message in messages:
            message.content[self.arrayrecord_key] = arrays
        return messages


class Krum(_OnPart, flower.Krum):
    """Flower's Krum; counts of batches do not take part in distances."""


class MultiKrum(_OnPart, flower.MultiKrum):
    """Flower's MultiKrum; counts of batches do not take part in distances."""


class Bulyan(_OnPart, flower.Bulyan):
    """Flower's Bulyan; counts of batches do not take part in distances."""

    def check_nodes(self, count: int) -> None:
        """Refuse to start with fewer nodes than the rule needs.

        Raises
        ------
        SettingsError
            If there are too few.
        """
        needed = 4 * self.num_malicious_nodes + 3
        if int(count * self.fraction_train) < needed:
            raise SettingsError(
                f"bulyan.num-malicious-nodes = {self.num_malicious_nodes}: Bulyan needs "
                f"4 x {self.num_malicious_nodes} + 3 = {needed} nodes that train in a round, got "
                f"{int(count * self.fraction_train)} (start more, or lower it)"
            )


class FedAvgM(_OnWeights, flower.FedAvgM):
    """Flower's FedAvgM."""


class FedAdagrad(_OnWeights, flower.FedAdagrad):
    """Flower's FedAdagrad."""


class FedAdam(_OnWeights, flower.FedAdam):
    """Flower's FedAdam."""


class FedYogi(_OnWeights, flower.FedYogi):
    """Flower's FedYogi."""


class QFedAvg(_OnWeights, flower.QFedAvg):
    """Flower's q-FedAvg, with the run's learning rate and the loss as our nodes name it.

    A loss counts as ten times the median at most, and as a tenth at least: a node says itself how
    high its own is, and a single one of 0 would leave nothing of everyone's step.
    """

    @classmethod
    def _from_run(cls, run: Run) -> dict[str, Any]:
        if run.train.lr_schedule != "constant":
            raise SettingsError(
                f'train.lr-schedule = "{run.train.lr_schedule}": q-FedAvg measures updates in '
                'units of one learning rate (set it to "constant")'
            )
        return {"client_learning_rate": run.train.lr, "train_loss_key": TRAIN_LOSS}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies' models; names, order and types stay."""
        replies = usable(replies)
        losses = [number(reply, TRAIN_LOSS) for reply in replies]
        usual = median(losses) if losses else 0.0
        for reply, loss in zip(replies, losses, strict=True):
            counting = min(max(loss, usual / FAR_LOSS), usual * FAR_LOSS)
            reply.content.metric_records[METRICS][TRAIN_LOSS] = counting
        return super().aggregate_train(server_round, replies)


class _CentralPrivacy(Answered):
    """Flower's wrapper around FedAvg, whose noise is for a mean in which all nodes weigh alike."""

    num_sampled_clients: int

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`.

        Raises
        ------
        SettingsError
            If the model holds more than weights, because noise on variances could make them
            negative; or if layers share weights, because each would have noise of its own.
        """
        shared = set(trained_names(run.model)) - dict(run.model.named_parameters()).keys()
        if shared:
            raise SettingsError(
                f"model: layers share {min(shared)!r}, and differential privacy at the server adds "
                "other noise to each layer (give each one weights of its own)"
            )
        if others := run.model.state_dict().keys() - set(trained_names(run.model)):
            raise SettingsError(
                f"model: differential privacy at the server adds noise to all arrays, and "
                f"{min(others)!r} is no weight (take a model without batch normalisation, such "
                "as convnet3)"
            )
        own: dict[str, Any] = {**settings.model_dump(), **arguments}
        return cls(FedAvg(**run.sampling), num_sampled_clients=1, **own)  # type: ignore[call-arg]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable replies, with noise for as many nodes.

        Flower's wrappers skip a round in which a node fails, scale the noise to a number given
        beforehand, and weigh nodes by samples, so that a large one would be protected less. Those
        that clip at the server divide by zero for a node that sends back the model as it was.
        """
        start = as_arrays(getattr(self, "current_arrays", ArrayRecord()))
        replies = [reply for reply in usable(replies) if _differs(reply, start)]
        if not replies:
            return None, None
        for reply in replies:
            reply.content.metric_records[METRICS][NUM_EXAMPLES] = 1
        self.num_sampled_clients = len(replies)
        return super().aggregate_train(server_round, replies)  # type: ignore[safe-super]


class DifferentialPrivacyServerSideFixedClipping(
    _CentralPrivacy, flower.DifferentialPrivacyServerSideFixedClipping
):
    """Flower's wrapper around FedAvg; the server clips updates."""


class DifferentialPrivacyClientSideFixedClipping(
    _CentralPrivacy, flower.DifferentialPrivacyClientSideFixedClipping
):
    """Flower's wrapper around FedAvg; nodes clip their updates."""


class DifferentialPrivacyServerSideAdaptiveClipping(
    _CentralPrivacy, flower.DifferentialPrivacyServerSideAdaptiveClipping
):
    """Flower's wrapper around FedAvg; the server clips updates by a norm that adapts."""


class DifferentialPrivacyClientSideAdaptiveClipping(
    _CentralPrivacy, flower.DifferentialPrivacyClientSideAdaptiveClipping
):
    """Flower's wrapper around FedAvg; nodes clip their updates by a norm that adapts."""


def _part(record: ArrayRecord, names: Collection[str]) -> ArrayRecord:
    """The arrays of these names, in the record's order, in a record of their own."""
    return ArrayRecord({name: array for name, array in record.items() if name in names})


def _differs(reply: Message, start: Arrays) -> bool:
    """Whether a reply's model is another than the node was sent; if not, the log names it."""
    arrays = RecordArrays(sent_arrays(reply))
    if start and all(np.array_equal(arrays[name], array) for name, array in start.items()):
        node = reply.metadata.src_node_id
        log(WARNING, "Model of node %d rejected: it is the one that it was sent", node)
        return False
    return True


def _mean_of(names: Collection[str], replies: list[Message]) -> dict[str, Any]:
    return weighted_mean(
        (number(reply, NUM_EXAMPLES), RecordArrays(_part(sent_arrays(reply), names)))
        for reply in replies
    )
