"""Features of a node's samples by a frozen network, computed once and cached."""

import hashlib
import io
import time
from dataclasses import replace
from functools import lru_cache
from logging import INFO

import numpy as np
import torch
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_distill.client.local_data import LocalData
from flwr_distill.client.session import Session, Source
from flwr_distill.client.terms import extractor
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.backbones import Frozen, fingerprint, seen_spec
from flwr_distill.task.compute.memory_format import in_fast_format
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import BATCH
from flwr_distill.task.models import last_dense_layer
from flwr_distill.task.settings import TaskSettings

LOG_INTERVAL = 10.0
"""Seconds between lines of progress."""
PROBED = 4
"""Samples whose features are computed again: no hash says what a network's code makes of them."""
ROUNDING = 0.01
"""Share by which other features of these differ at least; devices differ by less."""


def seen_data(session: Session) -> LocalData:
    """The node's data as training sees them; a model takes either.

    Where only the head of a frozen network trains, these are vectors, and else the samples.
    """
    source, task, data = session.source, session.task, session.data
    spec = _seen_spec(source, task, data.spec)
    if spec == data.spec:
        return data
    return _seen_data(source, task, data, spec, session.store, session.device)


def as_seen(session: Session, inputs: Tensor) -> Tensor:
    """Samples of the run as training sees them; see `seen_data`. Vectors are not changed."""
    if inputs.shape[1:] == _seen_spec(session.source, session.task, session.own.spec).shape:
        return inputs
    data, seen = session.data, seen_data(session)
    for own, known in ((data.train, seen.train), (data.holdout, seen.holdout)):
        if inputs is own.inputs:
            return known.inputs
    model = session.new_model()
    return _vectors(session.task, model, session.store, inputs, session.device)


@lru_cache(maxsize=4)
def _seen_spec(source: Source, task: TaskSettings, spec: DataSpec) -> DataSpec:
    return seen_spec(source.model(task, spec), spec, task.train)


@lru_cache(maxsize=32)
def _seen_data(
    source: Source,
    task: TaskSettings,
    data: LocalData,
    spec: DataSpec,
    store: NodeStore,
    device: torch.device,
) -> LocalData:
    model = source.model(task, data.spec)
    train, holdout = (
        replace(own, inputs=_vectors(task, model, store, own.inputs, device))
        for own in (data.train, data.holdout)
    )
    return LocalData(spec, train, holdout, data.fingerprint)


def _vectors(
    task: TaskSettings, model: nn.Module, store: NodeStore, inputs: Tensor, device: torch.device
) -> Tensor:
    """Vectors of a frozen network, on the device of `inputs`."""
    assert isinstance(model, Frozen)
    if not len(inputs):  # as where train.holdout is 0
        return inputs.new_empty(0, *model.vector_shape)
    features = torch.from_numpy(_cached(task, model, store, inputs, device)).float()
    return model.as_vectors(features).to(inputs.device)


def kept_features(session: Session, inputs: Tensor) -> NDArray[np.float16]:
    """Features of samples, (n, d), by the run's initial model; cached in the node's store.

    Features beyond the range of float16 are a SettingsError.
    """
    task = session.task
    return _cached(task, session.new_model(), session.store, inputs, session.device)


def _cached(
    task: TaskSettings, model: nn.Module, store: NodeStore, inputs: Tensor, device: torch.device
) -> NDArray[np.float16]:
    model.requires_grad_(False)
    last_dense_layer(model).requires_grad_(True)  # which the features do not depend on
    pixels = hashlib.sha256(inputs.cpu().numpy().tobytes()).hexdigest()
    key = f"features-{fingerprint(model)[:24]}-{pixels[:24]}.npy"
    if (payload := store.lasting.read(key)) is not None:
        features: NDArray[np.float16] = np.load(io.BytesIO(payload))
        if _alike(features[:PROBED], _features(model, inputs[:PROBED], device).numpy()):
            return features
    features = _features(model, inputs, device).numpy()
    if not np.isfinite(features).all():
        raise SettingsError(
            "its features are beyond 65,504",
            where="model",
            value=task.model,
            remedy="end it with a normalisation",
        )
    written = io.BytesIO()
    np.save(written, features)
    store.lasting.write(key, written.getvalue())
    return features


def _alike(cached: NDArray[np.float16], own: NDArray[np.float16]) -> bool:
    """Whether cached features are those that the network's code gives now."""
    if cached.shape != own.shape:
        return False
    now = own.astype(np.float64)
    return bool(np.linalg.norm(cached - now) <= ROUNDING * np.linalg.norm(now))


def _features(model: nn.Module, inputs: Tensor, device: torch.device) -> Tensor:
    """Features of samples, float16 on the CPU; the log has the progress."""
    extract, logged = extractor(model.to(device)), time.monotonic()
    features: list[Tensor] = []
    with in_fast_format(model) as memory_format, torch.inference_mode():
        for start in range(0, len(inputs), BATCH):
            batch = inputs[start : start + BATCH].to(device).contiguous(memory_format=memory_format)
            features.append(extract(batch).flatten(1).half().cpu())
            if time.monotonic() > logged + LOG_INTERVAL:
                logged = time.monotonic()
                log(INFO, "Features of %d of %d samples", start + len(batch), len(inputs))
    return torch.cat(features)
