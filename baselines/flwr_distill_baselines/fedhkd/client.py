"""FedHKD on nodes: its loss terms, and the hyper-knowledge that they send."""

from typing import Self

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.dp_sgd import require_no_privacy, secret_generator
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.task.models import last_dense_layer
from flwr_distill.task.settings import TrainSettings
from flwr_distill_baselines.common.class_tables import means_by_class, table
from flwr_distill_baselines.fedhkd.method import (
    FEATURES,
    HYPER_KNOWLEDGE,
    KNOWLEDGE_LOSS,
    PREDICTIONS,
    FedHKDSettings,
)


class Knowledge(LossTerm):
    """``lambda KL(Q || q(H)) + gamma |f(x) - h_y|^2`` (Chen et al. 2023).

    H and Q are the global mean features and soft predictions of all known classes. q(H) is what
    the classifier in training predicts on H at temperature T; the divergence is the mean over
    these classes. f(x) are a sample's features and h_y the global mean of its class; that distance
    is the mean over the minibatch and features, 0 for samples whose class has no mean. In the
    first round there are none, and the term is 0.

    Parameters
    ----------
    model : nn.Module
        In training.
    request : FedHKDSettings
        Weights, temperature and noise.
    knowledge : ArrayRecord, optional
        The global hyper-knowledge; None in the first round.
    layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    """

    mixes = "minibatch"

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        request: FedHKDSettings,
        knowledge: ArrayRecord | None,
        layer: str = "",
    ) -> None:
        self._request = request
        self._features = Features(model, layer)
        self._classifier = last_dense_layer(model, layer)
        self._known: Tensor | None = None
        if knowledge is not None:
            classes, device = session.data.spec.num_classes, session.device
            self._means, self._known = table(knowledge, FEATURES, classes, device)
            self._predictions, _ = table(knowledge, PREDICTIONS, classes, device)

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with FedHKD's record."""
        request = FedHKDSettings.checked(content.config_records[KNOWLEDGE_LOSS], "message")
        knowledge = content.array_records.get(HYPER_KNOWLEDGE)
        return cls(session, model, request, knowledge, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value; soft labels count as their likeliest class."""
        if self._known is None:
            return logits.new_zeros(())
        classes = labels.argmax(1) if labels.ndim == 2 else labels
        difference = self._features.last.flatten(1) - self._means[classes]
        distance = (self._known[classes, None] * difference).square().mean()
        weight, bias = self._classifier.weight, self._classifier.bias
        on_means = functional.linear(self._means[self._known], weight, bias)  # past the hook
        divergence = functional.kl_div(
            (on_means / self._request.temperature).log_softmax(1),
            self._predictions[self._known],
            reduction="batchmean",
        )
        return (
            self._request.prediction_weight * divergence + self._request.feature_weight * distance
        )


def train_knowledge(message: Message, context: Context) -> Message:
    """Train the received model, and reply with it and the node's hyper-knowledge."""
    session = Session.of(context)
    local = LocalRound.of(session, message.content)
    require_no_privacy(local.settings, "FedHKD's hyper-knowledge")
    request = FedHKDSettings.checked(message.content.config_records[KNOWLEDGE_LOSS], "message")
    reply = local.train(session.data.train)
    reply[HYPER_KNOWLEDGE] = ArrayRecord(own_knowledge(local, request, secret_generator()))
    reply[ARRAYS] = local.trained_model()
    return Message(reply, reply_to=message)


def own_knowledge(
    local: LocalRound, request: FedHKDSettings, generator: torch.Generator
) -> dict[str, Tensor]:
    """Mean features, with noise, and mean soft predictions of each class, after training.

    Nodes take a `generator` of the noise that is seeded by the operating system: the server knows
    the run's seed, and could subtract noise that depends on it.
    """
    model = local.model.eval()
    features = Features(model, local.settings.feature_layer)

    def outputs(inputs: Tensor) -> dict[str, Tensor]:
        soft = (model(inputs) / request.temperature).softmax(1)
        return {FEATURES: features.last.flatten(1), PREDICTIONS: soft}

    data, device = local.session.data, local.session.device
    own = means_by_class(outputs, data.train, data.spec.num_classes, device)
    noise = torch.randn(own[FEATURES].shape, generator=generator)
    return {**own, FEATURES: own[FEATURES] + request.noise * noise}
