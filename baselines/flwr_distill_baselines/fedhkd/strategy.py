"""FedHKD: class means of features and soft predictions travel with the models."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from flwr_distill.protocol.arrays import Arrays, sent_arrays
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.task.models import last_dense_layer
from flwr_distill_baselines.common.class_means import mean_by_class, record_of_means
from flwr_distill_baselines.fedhkd.method import (
    FEATURES,
    HYPER_KNOWLEDGE,
    KNOWLEDGE_LOSS,
    PREDICTIONS,
    TRAIN_KNOWLEDGE,
    FedHKDSettings,
    hyper_knowledge,
)


class FedHKD(CheckedFedAvg):
    """Data-free hyper-knowledge distillation (Chen et al. 2023).

    Models are averaged as in FedAvg. With its model, a node sends hyper-knowledge: for each class,
    the mean of its samples' features, with Gaussian noise, and of their softened predictions
    (:mod:`.client`). The server averages both over the nodes that have the
    class, weighted by their samples of it, and sends them with the next model. Nodes add to their
    loss how far the classifier's predictions on the global mean features are from the global
    predictions, and how far their features are from the global means of their classes
    (`client.Knowledge`).

    Parameters
    ----------
    model : nn.Module
        The run's architecture.
    feature_layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    **kwargs
        Settings (`method.FedHKDSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    Defaults are those of the published code. There the server takes the means of the node that
    replied last; the mean over nodes is the paper's. That code also divides the divergence by the
    number of classes, and clips gradients to a norm of 1.1; ours does neither. A class that no
    node of a round has keeps its means.
    """

    settings: FedHKDSettings = FedHKDSettings()
    run_arguments = ("model", "feature_layer")
    state_keys = ("features", "predictions")

    def __init__(self, *, model: nn.Module, feature_layer: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.features: dict[int, NDArray[np.float32]] = {}
        """Global mean features by class."""
        self.predictions: dict[int, NDArray[np.float32]] = {}
        """Global mean soft predictions by class."""
        last = last_dense_layer(model, feature_layer)
        self._width, self._num_classes = last.in_features, last.out_features

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train with the global hyper-knowledge, and send their own."""
        sampled = super().configure_train(server_round, arrays, config, grid)
        return [Message(m.content, m.metadata.dst_node_id, TRAIN_KNOWLEDGE) for m in sampled]

    def records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Ask for the loss terms, and send the global hyper-knowledge once there is any."""
        request = ConfigRecord(self.settings.model_dump(by_alias=True))
        if not self.features:
            return {KNOWLEDGE_LOSS: request}
        means = {FEATURES: self.features, PREDICTIONS: self.predictions}
        return {KNOWLEDGE_LOSS: request, HYPER_KNOWLEDGE: record_of_means(**means)}

    def read(self, reply: Message) -> Update:
        """Read a reply, which must bring the node's hyper-knowledge."""
        self._knowledge(reply)
        return super().read(reply)

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models, and the hyper-knowledge of each class."""
        sent = [(update.num_examples, self._knowledge(update.reply)) for update in updates]
        self.features = {**self.features, **mean_by_class(sent, FEATURES)}
        self.predictions = {**self.predictions, **mean_by_class(sent, PREDICTIONS)}
        return super().combine(updates)

    def _knowledge(self, reply: Message) -> Arrays:
        record = sent_arrays(reply, HYPER_KNOWLEDGE)
        return hyper_knowledge(record, self._width, self._num_classes)
