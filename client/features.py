"""Features of a node's samples by a frozen network, computed once and kept."""

import hashlib
import io
import time
from logging import INFO

import numpy as np
import torch
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn

from client.session import Session
from client.terms import extractor
from task.backbones import Frozen, fingerprint
from task.models import last_dense_layer, model_of
from task.settings import SettingsError

BATCH = 64
SECONDS = 10.0
"""Between lines of progress."""


def as_features(session: Session, model: nn.Module, inputs: Tensor) -> Tensor:
    """Images as what the head of a frozen network sees; as they are if its features change.

    A model takes either for input.
    """
    if not isinstance(model, Frozen) or model.trained:
        return inputs
    return torch.from_numpy(kept_features(session, inputs)).float().to(inputs.device)


def kept_features(session: Session, inputs: Tensor) -> NDArray[np.float16]:
    """Features of samples, (n, d), from the node's store if they are there.

    They are those of the run's model with the weights that it begins with.

    Raises
    ------
    SettingsError
        If the network gives features that float16 does not hold.
    """
    task = session.task
    model = model_of(task, session.data.spec, seed=task.seed).requires_grad_(False)
    last_dense_layer(model).requires_grad_(True)  # which the features do not depend on
    pixels = hashlib.sha256(inputs.cpu().numpy().tobytes()).hexdigest()
    key = f"features-{fingerprint(model)[:24]}-{pixels[:24]}.npy"
    if (kept := session.store.lasting.read(key)) is not None:
        features: NDArray[np.float16] = np.load(io.BytesIO(kept))
        return features
    features = _features(session, model, inputs).numpy()
    if not np.isfinite(features).all():
        raise SettingsError(
            f"model = {task.model!r}: its features are beyond 65,504 (end it with a normalisation)"
        )
    written = io.BytesIO()
    np.save(written, features)
    session.store.lasting.write(key, written.getvalue())
    return features


@torch.inference_mode()
def _features(session: Session, model: nn.Module, inputs: Tensor) -> Tensor:
    """Features of samples, float16 on the CPU; the log tells how far it is."""
    extract, told = extractor(model.to(session.device)), time.monotonic()
    features: list[Tensor] = []
    for start in range(0, len(inputs), BATCH):
        batch = inputs[start : start + BATCH].to(session.device)
        features.append(extract(batch).flatten(1).half().cpu())
        if time.monotonic() > told + SECONDS:
            told = time.monotonic()
            log(INFO, "Features of %d of %d samples", start + len(batch), len(inputs))
    return torch.cat(features)
