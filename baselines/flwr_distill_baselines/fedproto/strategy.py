"""FedProto: nodes keep models of their own and share class prototypes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray
from torch import nn

from flwr_distill.protocol.arrays import Arrays, sent_arrays
from flwr_distill.strategies.common.checked import Update
from flwr_distill.strategies.common.own_models import OwnModels
from flwr_distill.task.models import last_dense_layer
from flwr_distill_baselines.common.class_means import class_means, mean_by_class, record_of_means
from flwr_distill_baselines.fedproto.method import (
    EVALUATE_PROTOTYPES,
    PROTOTYPE_DISTANCE,
    PROTOTYPES,
    TRAIN_PROTOTYPES,
    FedProtoSettings,
)


class FedProto(OwnModels):
    """Federated prototype learning across heterogeneous clients (Tan et al. 2022).

    A node's prototype of a class is the mean of its samples' features, the input of the last dense
    layer. Node i trains its own model on the cross-entropy and lambda times the distance to the
    global prototypes (`client.PrototypeDistance`). The global prototype of a class
    is the mean of those of the nodes that have it, weighted by their samples of it. There is no
    global model: nodes evaluate their own ones, by the nearest global prototype and by their
    classifier.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; nodes may have others, with as many features.
    feature_layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    **kwargs
        Settings (`method.FedProtoSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    The published code takes the plain mean over nodes. A class that no node of a round has keeps
    its prototype.
    """

    settings: FedProtoSettings = FedProtoSettings()
    run_arguments = ("model", "feature_layer")
    state_keys = ("prototypes",)
    train_type = TRAIN_PROTOTYPES
    evaluate_type = EVALUATE_PROTOTYPES

    def __init__(self, *, model: nn.Module, feature_layer: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prototypes: dict[int, NDArray[np.float32]] = {}
        """Global prototypes by class."""
        last = last_dense_layer(model, feature_layer)
        self._width, self._num_classes = last.in_features, last.out_features

    def records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Ask for the distance, and send the global prototypes once there are any."""
        request = ConfigRecord(self.settings.model_dump(by_alias=True))
        if not self.prototypes:
            return {PROTOTYPE_DISTANCE: request}
        prototypes = record_of_means(**{PROTOTYPES: self.prototypes})
        return {PROTOTYPE_DISTANCE: request, PROTOTYPES: prototypes}

    def sent(self, reply: Message) -> Arrays:
        """Prototypes of a node."""
        record = sent_arrays(reply, PROTOTYPES)
        return class_means(record, {PROTOTYPES: self._width}, self._num_classes)

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the prototypes of each class; the arrays of Flower's loop stay."""
        sent = ((update.num_examples, update.arrays) for update in updates)
        self.prototypes = {**self.prototypes, **mean_by_class(sent, PROTOTYPES)}
        return self.start_of_round
