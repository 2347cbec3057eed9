"""FedHEAD on nodes: members send models to their sector's leader, which averages and distils them.

A node stores its trained model in case another node takes over as leader. A leader also stores
its members' models, one file each, and loads one at a time to save memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from safetensors.numpy import load, save
from torch import nn

from client.dp_sgd import require_no_privacy
from client.local_round import LocalRound, build_model, received_arrays
from client.session import Session
from distill.ensemble import Distilled, distil_ensemble, teacher_probabilities
from links import LinkError, receive, send
from protocol.arrays import Arrays, arrays_of, as_record, as_tensors, check_arrays
from protocol.averages import weighted_mean
from protocol.ensemble import EnsembleDistillation
from protocol.fedhead import GLOBAL_MODEL, LEADS, LINK_ERROR, SECTOR_MODEL
from protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    METRICS,
    NUM_EXAMPLES,
    PARCEL,
    REJECTED,
    ROUTE,
    SERVER_ROUND,
)
from protocol.outliers import absurdly_large, update_norm
from task.models import create_model
from task.words import counted

OWN = 0
"""Rank of the leader's own model; members' ranks start at 1."""
MEMBERS = "sector-members"

T = TypeVar("T")


@dataclass(frozen=True)
class SectorMean:
    """Mean of a sector's models.

    Parameters
    ----------
    arrays : Mapping[str, ndarray]
        w_m.
    num_examples : int
        Samples that the averaged models were trained on.
    rejected : Mapping[int, str]
        Reasons for rejected models, by the member's rank.
    """

    arrays: Arrays
    num_examples: int
    rejected: Mapping[int, str]


def train_sector(message: Message, context: Context) -> Message:
    """Train the received model; if not the leader, send it to the leader (step 1)."""
    session, content = Session.of(context), message.content
    local = LocalRound.of(session, content, _global_model(session, content))
    trained = local.train(session.data.train)
    session.store.write(_file(OWN), save(arrays_of(local.model)))
    if not content.config_records[CONFIG].get(LEADS):
        trained.update(_send_trained(session, content))
    return Message(trained, reply_to=message)


def hand_in(message: Message, context: Context) -> Message:
    """Send the stored trained model to the sector's new leader (step 1)."""
    return Message(_send_trained(Session.of(context), message.content), reply_to=message)


def hand_out(message: Message, context: Context) -> Message:
    """Store the global model, and send it to every member with a route (step 5).

    The reply has a ``parcel.<rank>`` for each member that was reached; failures are logged.
    """
    session = Session.of(context)
    payload = save(dict(received_arrays(message.content)))
    session.store.write(GLOBAL_MODEL, payload)
    parcels = RecordDict()
    for rank, route in _ranked(message.content.config_records, ROUTE):
        try:
            parcels[f"{PARCEL}.{rank}"] = send(session, route, payload)
        except LinkError as error:
            log(WARNING, "Cannot send the model to member %d: %s", rank, error)
    return Message(parcels, reply_to=message)


def aggregate_sector(message: Message, context: Context) -> Message:
    """Reply with the mean of the sector's models (step 2)."""
    mean = mean_of_sector(Session.of(context), message.content)
    metrics = MetricRecord({NUM_EXAMPLES: mean.num_examples, REJECTED: len(mean.rejected)})
    reasons = ConfigRecord({f"{REJECTED}.{rank}": why for rank, why in mean.rejected.items()})
    content = RecordDict({ARRAYS: as_record(mean.arrays), METRICS: metrics, CONFIG: reasons})
    return Message(content, reply_to=message)


def distill_sector(message: Message, context: Context) -> Message:
    """Distil the sector's ensemble into the received model, and reply with that (step 4)."""
    session = Session.of(context)
    config = dict(message.content.config_records[CONFIG])
    server_round = config.pop(SERVER_ROUND)
    request = EnsembleDistillation.checked(config, "message")
    require_no_privacy(session.task.train, "distillation on a leader's data (FedHEAD)")
    student = build_model(session, received_arrays(message.content))
    distilled = distil_sector(session, student, request, int(str(server_round)))
    metrics = MetricRecord({"distill-loss": distilled.loss, "distill-epochs": distilled.epochs})
    arrays = ArrayRecord(student.state_dict())
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)


def mean_of_sector(session: Session, content: RecordDict) -> SectorMean:
    """Mean of the leader's and members' models, ``w_m = sum_k (p_km / p_m) w_km`` (step 2).

    Parameters
    ----------
    session : Session
        The leader's.
    content : RecordDict
        ``delivery.<rank>`` of each member, from 1; the config has ``num-examples.<rank>``. Rank 0
        is the leader's own model in its store, if it trained one.

    Raises
    ------
    ValueError
        If no model is usable.
    """
    config = content.config_records[CONFIG]
    counts = {rank: int(str(count)) for rank, count in _ranked(config, NUM_EXAMPLES)}
    start = _start(session)
    norms = {}
    if OWN in counts:
        norms[OWN] = update_norm(check_arrays(_stored(session, OWN), start), start)
    rejected = {}
    for rank, delivery in _ranked(content.config_records, DELIVERY):
        try:
            payload = receive(session, delivery, SECTOR_MODEL)
            norms[rank] = update_norm(check_arrays(load(payload), start), start)
        except Exception as error:  # hostile bytes make the reader raise all sorts
            rejected[rank] = str(error) or type(error).__name__
            continue
        session.store.write(_file(rank), payload)
    for rank in absurdly_large(norms, session.task.norm_threshold):
        rejected[rank] = "its norm is beyond norm-threshold"
        del norms[rank]
    weights = {rank: counts[rank] for rank in norms}
    mean = weighted_mean((weight, _stored(session, rank)) for rank, weight in weights.items())
    members = {SERVER_ROUND: config[SERVER_ROUND], "weights": list(weights.items())}
    session.store.write(MEMBERS, json.dumps(members).encode())
    return SectorMean(mean, sum(weights.values()), rejected)


def distil_sector(
    session: Session, student: nn.Module, request: EnsembleDistillation, server_round: int
) -> Distilled:
    """Distil the sector's ensemble into `student`, in place, on the leader's data (step 4).

    The teacher is ``sum_k (p_km / p_m) f(x; w_km)`` over the models of `mean_of_sector`.

    Raises
    ------
    ValueError
        If the node did not aggregate its sector in this round.
    """
    file = session.store.folder / MEMBERS
    members = json.loads(file.read_bytes()) if file.exists() else {}
    if members.get(SERVER_ROUND) != server_round:
        raise ValueError(f"this node has no sector's models of round {server_round}")
    inputs = session.data.train.inputs
    models = _models(session, members["weights"])
    teacher = teacher_probabilities(models, inputs, average=request.average)
    distilled = distil_ensemble(
        student,
        inputs,
        teacher,
        epochs=request.distill_epochs,
        patience=request.patience,
        lr=request.distill_lr,
        weight_decay=request.distill_weight_decay,
        batch_size=request.distill_batch_size,
        generator=session.generator("distill-sector", server_round),
    )
    log(INFO, "Distilled %s: %s", counted(len(members["weights"]), "model"), distilled)
    return distilled


def _send_trained(session: Session, content: RecordDict) -> RecordDict:
    """Send the stored model along the message's ``route``.

    If sending fails, the result reports the error instead of raising it: the training is not lost,
    as another leader can still get the model.
    """
    payload = (session.store.folder / _file(OWN)).read_bytes()
    try:
        return RecordDict({PARCEL: send(session, content.config_records[ROUTE], payload)})
    except LinkError as error:
        return RecordDict({CONFIG: ConfigRecord({LINK_ERROR: str(error)})})


def _global_model(session: Session, content: RecordDict) -> Arrays:
    """The global model: from the message, from the leader, or a leader's own copy.

    Every node stores it, because any may become leader and then measures updates against it.

    Raises
    ------
    LinkError
        If the leader's parcel cannot be opened.
    """
    if content.array_records:
        arrays = received_arrays(content)
    elif DELIVERY in content.config_records:
        arrays = load(receive(session, content.config_records[DELIVERY], GLOBAL_MODEL))
    else:
        return load((session.store.folder / GLOBAL_MODEL).read_bytes())
    session.store.write(GLOBAL_MODEL, save(dict(arrays)))
    return arrays


def _models(
    session: Session, weights: Iterable[tuple[int, int]]
) -> Iterator[tuple[float, nn.Module]]:
    """Weight and model of each node of the sector; reuses one model's memory."""
    model = create_model(session.task.model, session.data.spec).to(session.device)
    for rank, weight in weights:
        model.load_state_dict(as_tensors(_stored(session, rank)))
        yield weight, model


def _start(session: Session) -> Arrays:
    """The model before training in this round, or an arbitrary one if the node has none."""
    payload = session.store.read(GLOBAL_MODEL)
    if payload is None:
        return arrays_of(create_model(session.task.model, session.data.spec))
    return load(payload)


def _stored(session: Session, rank: int) -> Arrays:
    return load((session.store.folder / _file(rank)).read_bytes())


def _file(rank: int) -> str:
    return f"{SECTOR_MODEL}-{rank}"


def _ranked(records: Mapping[str, T], name: str) -> list[tuple[int, T]]:
    """Entries ``<name>.<rank>`` with their ranks."""
    prefix = f"{name}."
    return [
        (int(key.removeprefix(prefix)), value)
        for key, value in records.items()
        if key.startswith(prefix)
    ]
