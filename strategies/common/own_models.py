"""Base class of strategies whose nodes keep models of their own."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.run import Run


class OwnModels(CheckedFedAvg):
    """Nodes keep models of their own; what the server combines are other arrays.

    Neither messages nor replies carry a model, and the arrays of Flower's loop stay as they were.
    Nodes evaluate their own models. In a run of our ServerApp all do
    where ``fraction-evaluate`` is 0, its default, because there is no other accuracy.

    Attributes
    ----------
    train_type, evaluate_type : str
        Message types of training and evaluation.
    """

    train_type: ClassVar[str]
    evaluate_type: ClassVar[str]

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `CheckedFedAvg`."""
        evaluate = {"fraction_evaluate": run.fraction_evaluate or 1.0}
        return super().from_run(settings, run, **{**evaluate, **arguments})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train their own models."""
        sampled = super().configure_train(server_round, arrays, config, grid)
        return self._messages(sampled, config, self.train_type, self.records())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes evaluate their own models."""
        sampled = super().configure_evaluate(server_round, arrays, config, grid)
        return self._messages(sampled, config, self.evaluate_type, self.evaluate_records())

    def evaluate_records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Records of evaluation messages; by default those of training (`records`)."""
        return self.records()

    def _messages(
        self,
        sampled: Iterable[Message],
        config: ConfigRecord,
        message_type: str,
        records: Mapping[str, ArrayRecord | ConfigRecord],
    ) -> list[Message]:
        content = RecordDict({self.configrecord_key: config, **records})
        return [Message(content, m.metadata.dst_node_id, message_type) for m in sampled]
