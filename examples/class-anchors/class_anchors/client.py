"""The nodes: the handler of the phase, and the loss term."""

from typing import Self

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from class_anchors.method import ANCHORS, COUNTS, MEANS, PULL, Survey
from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import build_model, received_arrays
from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm
from flwr_distill.protocol.arrays import as_arrays, as_tensors
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS
from flwr_distill.task.settings import TrainSettings

BATCH_SIZE = 1024


def report_class_means(message: Message, context: Context) -> Message:
    """Reply with mean features and numbers of samples of this node's classes."""
    session = Session.of(context)
    require_no_privacy(session.task.train, "the survey of class means")
    survey = Survey.checked(message.content.config_records[CONFIG], "message")
    model = build_model(session, received_arrays(message.content)).eval()
    recorded = Features(model, session.task.train.feature_layer)
    data = session.data
    features = []
    with torch.no_grad():
        for batch in torch.split(data.train.inputs, BATCH_SIZE):
            model(batch)
            features.append(recorded.last.flatten(1))
    means, counts = class_means(
        torch.cat(features), data.train.labels, data.spec.num_classes, survey.fewest
    )
    arrays = ArrayRecord({MEANS: Array(means.cpu().numpy()), COUNTS: Array(counts.cpu().numpy())})
    metrics = MetricRecord({"num-classes": int((counts > 0).sum())})
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)


def class_means(
    features: Tensor, labels: Tensor, num_classes: int, fewest: int
) -> tuple[Tensor, Tensor]:
    """Mean the features of each class.

    Parameters
    ----------
    features : Tensor
        (n, d).
    labels : Tensor
        Class of each sample, int64 (n,).
    num_classes : int
        C.
    fewest : int
        Samples that a class needs; one with fewer counts as absent.

    Returns
    -------
    Tensor, Tensor
        Means (C, d), 0 for absent classes, and numbers of samples (C,).
    """
    counts = torch.bincount(labels, minlength=num_classes)
    counts = torch.where(counts < fewest, 0, counts)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    means = sums / counts.clamp(min=1)[:, None]
    return torch.where(counts[:, None] > 0, means, 0.0), counts


class Anchored(LossTerm):
    """``mean_i p_{y_i} |f_i - a_{y_i}|^2 / d`` over a minibatch.

    f_i are a sample's features in the model in training, a_c is the anchor of class c and p_c the
    pull to it; d is the number of features.

    Parameters
    ----------
    model : nn.Module
        In training.
    anchors : Tensor
        (C, d).
    pull : Tensor
        (C,).
    layer : str (default: "")
        Name of the dense layer whose input are the features; see :func:`task.models.last_dense`.
    """

    mixes = "sample"

    def __init__(self, model: nn.Module, anchors: Tensor, pull: Tensor, layer: str = "") -> None:
        self._features = Features(model, layer)
        self._anchors = anchors
        self._pull = pull

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a round; see :class:`client.terms.LossTerm`."""
        sent = as_tensors(as_arrays(content.array_records[ANCHORS]))
        anchors, pull = (sent[name].to(session.device) for name in (MEANS, PULL))
        return cls(model, anchors, pull, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """Give the term on a minibatch."""
        away = self._features.last.flatten(1) - self._anchors[labels]
        return (self._pull[labels] * away.square().mean(dim=1)).mean()
