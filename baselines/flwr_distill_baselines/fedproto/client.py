"""FedProto on nodes: training and evaluation of the node's own model with global prototypes."""

from collections.abc import Callable, Iterable
from typing import Self

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.own_model import MODEL, keep_own_model, own_model, with_own_model
from flwr_distill.client.session import Session, held_out
from flwr_distill.client.terms import Features, LossTerm, extractor
from flwr_distill.protocol.arrays import arrays_of
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import evaluate_model, outputs
from flwr_distill.task.models import last_dense_layer
from flwr_distill.task.settings import TrainSettings
from flwr_distill_baselines.common.class_tables import means_by_class, table
from flwr_distill_baselines.fedproto.method import PROTOTYPE_DISTANCE, PROTOTYPES, FedProtoSettings


class PrototypeDistance(LossTerm):
    """``lambda |f(x) - c_y|^2``, mean over samples and features (Tan et al. 2022).

    f(x) are a sample's features in the model in training, c_y is the global prototype of its class.
    A sample whose class has none is at distance 0. The paper takes the distance of class means; as
    in its published code, here it is that of each sample of the minibatch.

    Parameters
    ----------
    model : nn.Module
        In training.
    weight : float
        lambda.
    prototypes : tuple of Tensor, optional
        Prototypes by class, (classes, d), and which classes have one; None in the first round,
        where the term is 0.
    layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    """

    mixes = "sample"

    def __init__(
        self,
        model: nn.Module,
        weight: float,
        prototypes: tuple[Tensor, Tensor] | None,
        layer: str = "",
    ) -> None:
        self._features = Features(model, layer)
        self._weight = weight
        self._prototypes = prototypes

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with FedProto's record."""
        request = FedProtoSettings.checked(content.config_records[PROTOTYPE_DISTANCE], "message")
        prototypes = _prototypes(session, content)
        return cls(model, request.weight, prototypes, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value; soft labels count as their likeliest class."""
        if self._prototypes is None:
            return logits.new_zeros(())
        prototypes, known = self._prototypes
        classes = labels.argmax(1) if labels.ndim == 2 else labels
        difference = self._features.last.flatten(1) - prototypes[classes]
        return self._weight * (known[classes, None] * difference).square().mean()


def train_prototypes(message: Message, context: Context) -> Message:
    """Train the node's own model, keep it, and reply with its prototypes."""
    session = with_own_model(Session.of(context))
    model, _ = own_model(session)
    local = LocalRound.of(session, message.content, arrays_of(model))
    require_no_privacy(local.settings, "what FedProto sends of samples")
    reply = local.train(session.data.train)
    keep_own_model(local.session, local.model)
    reply[PROTOTYPES] = ArrayRecord(own_prototypes(local))
    return Message(reply, reply_to=message)


def own_prototypes(local: LocalRound) -> dict[str, Tensor]:
    """Mean features of each class of the node's training samples, with their counts."""
    model = local.model.eval()
    features = Features(model, local.settings.feature_layer)

    def outputs(inputs: Tensor) -> dict[str, Tensor]:
        model(inputs)
        return {PROTOTYPES: features.last.flatten(1)}

    data, device = local.session.data, local.session.device
    return means_by_class(outputs, data.train, data.spec.num_classes, device)


def evaluate_prototypes(message: Message, context: Context) -> Message:
    """Evaluate the node's own model on its holdout, by the nearest global prototype."""
    session = with_own_model(Session.of(context))
    holdout = held_out(session)
    model, _ = own_model(session)
    accuracy, loss = evaluate_model(model, holdout, session.device)
    metrics = MetricRecord(
        {
            NUM_EXAMPLES: len(holdout),
            "eval-accuracy": accuracy,
            "eval-loss": loss,
            "classifier-accuracy": accuracy,
        }
    )
    if prototypes := _prototypes(session, message.content):
        extract = extractor(model, session.task.train.feature_layer)
        nearest = nearest_prototype(extract, holdout.inputs, *prototypes)
        right = nearest == holdout.labels.to(nearest.device)
        metrics["eval-accuracy"] = float(right.double().mean())
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def nearest_prototype(
    extract: Callable[[Tensor], Tensor], inputs: Tensor, prototypes: Tensor, known: Tensor
) -> Tensor:
    """Class of the nearest known prototype in L2 distance (Tan et al. 2022), int64 (n,).

    `extract` maps inputs (n, ...) to features (n, d); prototypes are (classes, d).
    """

    def nearest(batch: Tensor) -> Tensor:
        distances = torch.cdist(extract(batch).flatten(1), prototypes)
        return distances.masked_fill(~known, torch.inf).argmin(1)

    return outputs(nearest, inputs, prototypes.device)


def needs(session: Session, settings: FedProtoSettings) -> Iterable[Callable[[], object]]:
    """Call that fails where the node's own architecture has other features than the run's."""
    yield lambda: _require_same_width(session)


def _require_same_width(session: Session) -> None:
    own = with_own_model(session)
    widths = [_width(s) for s in (session, own)]
    if widths[0] != widths[1]:
        raise SettingsError(
            f"it has {widths[1]} features before its last dense layer, and the run's "
            f"{session.task.model!r} has {widths[0]}: prototypes need equal numbers",
            where=MODEL,
            value=own.task.model,
            source="node config",
            remedy="take another model",
        )


def _width(session: Session) -> int:
    model = session.new_model()
    return last_dense_layer(model, session.task.train.feature_layer).in_features


def _prototypes(session: Session, content: RecordDict) -> tuple[Tensor, Tensor] | None:
    """The global prototypes of a message as a table; None if it has none."""
    record = content.array_records.get(PROTOTYPES)
    if record is None:
        return None
    return table(record, PROTOTYPES, session.data.spec.num_classes, session.device)
