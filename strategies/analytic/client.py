"""Closed-form heads on nodes: sums of the features of a frozen network."""

from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flwr_distill.client.dp_sgd import PrivacyAccount, secret_generator
from flwr_distill.client.features import kept_features
from flwr_distill.client.session import Session, held_out
from flwr_distill.distill.analytic import Sums, clipped, random_directions, solved
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.strategies.analytic.method import (
    FEATURES,
    SUMS,
    AnalyticSettings,
    SummedFeatures,
    SumsRequest,
    means_of,
    record_of,
    sums_of,
)

LONG = 1.1
"""Norm of features, in units of the clip, from which clipping is no matter of rounding."""


def send_sums(message: Message, context: Context) -> Message:
    """Reply with the sums of the features of the node's training samples.

    With ``train.dp-noise``, noise is added to them, and booked in the node's privacy account.
    """
    session = Session.of(context)
    request = SumsRequest.checked(message.content.config_records[FEATURES], "message")
    samples, train = session.data.train, session.task.train
    features = _seen(session, samples.inputs, request)
    usual = float(np.median(np.linalg.norm(features, axis=1)))
    if usual > LONG * request.clip:
        text = "Features are clipped to analytic.clip = %g; half of them are longer than %.3g"
        log(WARNING, text, request.clip, usual)
    sums = _sums(session, features, request)
    metrics = MetricRecord({NUM_EXAMPLES: len(samples)})
    if train.dp_noise:
        account = PrivacyAccount.of(session, train)
        account.spend(train.dp_noise, rate=1.0, steps=1)
        sums = sums.with_noise(request.clip, train.dp_noise, secret_generator())
        metrics.update(account.numbers(len(samples)))
    secure = context.run_config.get("secure-sums", False)
    own = means_of(sums, len(samples), request, train.dp_noise) if secure else record_of(sums)
    return Message(RecordDict({METRICS: metrics, SUMS: own}), reply_to=message)


def evaluate_own(message: Message, context: Context) -> Message:
    """Evaluate a head of the node's own on its holdout: its samples count more than others'."""
    session, content = Session.of(context), message.content
    request = AnalyticSettings.checked(content.config_records[FEATURES], "message")
    holdout = held_out(session)
    of_all = sums_of(as_arrays(content.array_records[SUMS]))
    own = _sums(session, _seen(session, session.data.train.inputs, request), request)
    shown = clipped(_seen(session, holdout.inputs, request), request.clip)
    labels = holdout.labels.cpu()

    def logits_of(sums: Sums) -> Tensor:
        head = solved(request.head, sums, request.regularisation)
        return torch.from_numpy(shown @ head.weight.T + head.bias)

    def accuracy(logits: Tensor) -> float:
        return float((logits.argmax(1) == labels).double().mean())

    logits = logits_of(of_all + own.times(request.personal))
    metrics: dict[str, Any] = {
        NUM_EXAMPLES: len(holdout),
        "eval-accuracy": accuracy(logits),
        "eval-loss": float(functional.cross_entropy(logits, labels)),
        "shared-accuracy": accuracy(logits_of(of_all)),
    }
    return Message(RecordDict({METRICS: MetricRecord(metrics)}), reply_to=message)


def _seen(session: Session, inputs: Tensor, request: SummedFeatures) -> NDArray[np.float64]:
    """Features of images, projected if that is asked for, (n, k)."""
    features = kept_features(session, inputs).astype(np.float64)
    if not request.projection:
        return features
    return features @ random_directions(features.shape[1], request.projection, session.task.seed)


def _sums(session: Session, features: NDArray[np.float64], request: SummedFeatures) -> Sums:
    """Sums over the node's training samples, given their features."""
    labels = session.data.train.labels.cpu().numpy()
    return Sums.of(clipped(features, request.clip), labels, session.data.spec.num_classes)
