"""Closed-form heads on nodes: features of the frozen network, computed once, and their sums."""

import hashlib
import io
import time
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor

from client.dp_sgd import PrivacyAccount, secret_generator
from client.session import Session
from client.terms import extractor
from distill.analytic import Sums, clipped, random_directions
from protocol.analytic import FEATURES, SUMS, SummedFeatures, record_of
from protocol.messages import METRICS, NUM_EXAMPLES
from task.backbones import fingerprint
from task.models import create_model, last_dense_layer
from task.settings import SettingsError

BATCH = 64
SECONDS = 10.0
"""Between lines of progress."""
LONG = 1.1
"""Norm of features, in units of the clip, from which clipping is no matter of rounding."""


def send_sums(message: Message, context: Context) -> Message:
    """Reply with the sums of the features of the node's training samples.

    With ``train.dp-noise``, noise is added to them, and booked in the node's privacy account.
    """
    session = Session.of(context)
    request = SummedFeatures.checked(message.content.config_records[FEATURES], "message")
    samples, train = session.data.train, session.task.train
    features: NDArray[np.floating] = kept_features(session)
    usual = float(np.median(np.linalg.norm(features.astype(np.float64), axis=1)))
    if usual > LONG * request.clip:
        text = "Features are clipped to analytic.clip = %g; half of them are longer than %.3g"
        log(WARNING, text, request.clip, usual)
    if request.projection:
        seed = session.task.seed
        features = features @ random_directions(features.shape[1], request.projection, seed)
    labels = samples.labels.cpu().numpy()
    sums = Sums.of(clipped(features, request.clip), labels, session.data.spec.num_classes)
    metrics = MetricRecord({NUM_EXAMPLES: len(samples)})
    if train.dp_noise:
        account = PrivacyAccount.of(session, train)
        account.spend(train.dp_noise, rate=1.0, steps=1)
        sums = sums.with_noise(request.clip, train.dp_noise, secret_generator())
        metrics.update(account.numbers())
    return Message(RecordDict({METRICS: metrics, SUMS: record_of(sums)}), reply_to=message)


def kept_features(session: Session) -> NDArray[np.float16]:
    """Features of the node's training samples, (n, d), from its store if they are there.

    Raises
    ------
    SettingsError
        If the network gives features that float16 does not hold.
    """
    task, inputs = session.task, session.data.train.inputs
    model = create_model(task.model, session.data.spec, seed=task.seed).requires_grad_(False)
    last_dense_layer(model).requires_grad_(True)  # which the features do not depend on
    pixels = hashlib.sha256(inputs.cpu().numpy().tobytes()).hexdigest()
    key = f"features-{fingerprint(model)[:24]}-{pixels[:24]}.npy"
    if (kept := session.store.lasting.read(key)) is not None:
        features: NDArray[np.float16] = np.load(io.BytesIO(kept))
        return features
    features = _features(session, model).numpy()
    if not np.isfinite(features).all():
        raise SettingsError(
            f"model = {task.model!r}: its features are beyond 65,504 (end it with a normalisation)"
        )
    written = io.BytesIO()
    np.save(written, features)
    session.store.lasting.write(key, written.getvalue())
    return features


@torch.inference_mode()
def _features(session: Session, model: torch.nn.Module) -> Tensor:
    """Features of all training samples, float16 on the CPU; the log tells how far it is."""
    extract = extractor(model.to(session.device))
    inputs, told = session.data.train.inputs, time.monotonic()
    features: list[Tensor] = []
    for start in range(0, len(inputs), BATCH):
        batch = inputs[start : start + BATCH].to(session.device)
        features.append(extract(batch).flatten(1).half().cpu())
        if time.monotonic() > told + SECONDS:
            told = time.monotonic()
            log(INFO, "Features of %d of %d samples", start + len(batch), len(inputs))
    return torch.cat(features)
