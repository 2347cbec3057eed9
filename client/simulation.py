"""Virtual nodes of a simulation, where a process can stand for each of them, or train many.

The server names in a train message the virtual nodes that get the same one. The first of them
trains all, the others find their results beside the nodes' stores.
"""

import fcntl
import random
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import log
from safetensors.torch import load, save

from flwr_distill.base.text import counted
from flwr_distill.client.local_round import LocalRound, server_round
from flwr_distill.client.session import RunSource, Session, source_of
from flwr_distill.client.terms import loss_terms
from flwr_distill.client.training import Trained
from flwr_distill.client.training_together import Weights, train_together, why_one_by_one
from flwr_distill.protocol.messages import (
    ARRAYS,
    BATCH,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    PARTITIONS,
    SIMULATED,
    TOGETHER,
)

LOCK_TIMEOUT = 3600.0
"""Seconds to wait for another process, which may be distilling for many virtual nodes."""

MAX_BATCH = 50
"""Nodes trained at once, so that their models, gradients and activations fit into memory."""

_RESULTS = "together-"


def in_simulation(context: Context) -> bool:
    """Whether the node is a virtual one: in Flower's simulation runtime, or by its node config.

    Where data come from someone's function, a process stands for its own node alone.
    """
    if PARTITION_ID not in context.node_config or source_of(context) != RunSource():
        return False
    ray = sys.modules.get("ray")
    in_ray = ray is not None and bool(ray.is_initialized())
    return in_ray or bool(context.node_config.get(SIMULATED))


def session_of(context: Context, partition: int) -> Session:
    """Session of the virtual node with another partition."""
    node_config = {**context.node_config, PARTITION_ID: partition}
    return Session.of(
        Context(context.run_id, context.node_id, node_config, context.state, context.run_config)
    )


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock a file that the processes of a simulation share; its folder is made if missing.

    A TimeoutError says that another process has had the lock for `LOCK_TIMEOUT`.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{file}: another process keeps it locked") from None
            time.sleep(random.uniform(0.02, 0.1))
        yield


def trains_together(context: Context, session: Session) -> bool:
    """Whether this node trains with others, if the server names some (``simulation.together``)."""
    choice = session.task.simulation.together
    wanted = choice == "on" or (choice == "auto" and session.device.type == "cuda")
    return wanted and in_simulation(context)


def trained_together(context: Context, content: RecordDict) -> RecordDict | None:
    """Model and metrics for a train message, made for several virtual nodes at once.

    None if the node has to train alone. Results stay in the run's folder until they are used or
    a later round begins, under the round and the server's name for the batch.
    """
    if TOGETHER not in content.config_records:
        return None
    session = Session.of(context)
    batch = content.config_records[TOGETHER]
    partitions = [int(partition) for partition in batch.get(PARTITIONS, [])]  # type: ignore[union-attr]
    if session.identity not in partitions or not trains_together(context, session):
        return None
    devices = int(context.node_config.get(SIMULATED, 1)) or 1
    partitions = [p for p in partitions if p % devices == session.identity % devices]
    num_groups = -(-len(partitions) // MAX_BATCH)
    group = partitions.index(session.identity) % num_groups
    run, name = session.store.folder.parent, f"{session.identity % devices}-{group}"
    config = content.config_records.get(CONFIG, ConfigRecord())
    round_name = f"{_RESULTS}{server_round(config):06d}-"
    folder = run / f"{round_name}{int(batch[BATCH])}"  # type: ignore[arg-type]
    with locked(run / f".{_RESULTS}{name}"):
        if not (folder / f"done-{name}").exists():
            _drop_earlier_rounds(run, round_name)
            folder.mkdir(exist_ok=True, mode=0o700)
            for partition, payload in _train(context, content, partitions[group::num_groups]):
                (folder / str(partition)).write_bytes(payload)  # needs to outlast nothing
            (folder / f"done-{name}").touch()
    own = folder / str(session.identity)
    if not own.exists():
        return None
    payload = own.read_bytes()
    own.unlink()
    return _reply(payload, len(session.data.train), content.array_records[ARRAYS])


def _train(
    context: Context, content: RecordDict, partitions: list[int]
) -> Iterator[tuple[int, bytes]]:
    """Train virtual nodes; yields none if they cannot train together."""
    local = LocalRound.of(Session.of(context), content)
    sessions = [session_of(context, partition) for partition in partitions]
    sessions = [session for session in sessions if len(session.data.train)]
    if not sessions:
        return
    if loss_terms(local.session, content, local.model, local.settings):
        reason = "the strategy adds terms to the loss"
    else:
        reason = why_one_by_one(local.model, sessions[0].data.train, local.settings)
    if reason:
        _log_once(context.run_id, reason)
        return
    try:
        results = train_together(
            local.model,
            [session.data.train for session in sessions],
            local.settings,
            [session.generator("train", local.round) for session in sessions],
            local.changes,
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        models = counted(len(sessions), "model")
        _log_once(context.run_id, f"the GPU has no room for {models} at once")
        return
    for session, (weights, trained) in zip(sessions, results, strict=True):
        yield session.identity, _payload(weights, trained)


def _payload(weights: Weights, trained: Trained) -> bytes:
    numbers = torch.tensor([trained.loss, trained.accuracy, trained.steps], dtype=torch.float64)
    return save({METRICS: numbers, **{f"{ARRAYS}.{name}": w for name, w in weights.items()}})


def _reply(payload: bytes, num_examples: int, names: ArrayRecord) -> RecordDict:
    tensors = load(payload)
    loss, accuracy, steps = tensors[METRICS].tolist()
    trained = Trained(loss, accuracy, int(steps))
    metrics = MetricRecord({NUM_EXAMPLES: num_examples, **trained.numbers()})
    arrays = OrderedDict((name, tensors[f"{ARRAYS}.{name}"]) for name in names)
    return RecordDict({METRICS: metrics, ARRAYS: ArrayRecord(arrays)})


def _drop_earlier_rounds(run: Path, round_name: str) -> None:
    """Not later ones, to which other processes write: this message may be a late one."""
    for folder in run.glob(f"{_RESULTS}*"):
        if folder.name < round_name:
            shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=64)
def _log_once(run_id: int, reason: str) -> None:
    log(INFO, "Virtual nodes train one by one: %s", reason)
