"""FedHEAD on nodes: members send models to their sector's leader, which averages and distils them.

A node stores its trained model in case another node takes over as leader. A leader also stores
its members' models, one file each, and loads one at a time to save memory.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, save
from torch import nn

from flwr_distill.base.text import counted
from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import LocalRound, build_model, received_arrays
from flwr_distill.client.parcels import received_model
from flwr_distill.client.session import Session, deadline_of
from flwr_distill.distill.ensemble import Distilled, distil_ensemble, saving, teacher_probabilities
from flwr_distill.links import LinkError, send
from flwr_distill.links.records import MAX_PARCEL
from flwr_distill.protocol.arrays import Arrays, arrays_of, as_record, check_arrays, load_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    METRICS,
    NUM_EXAMPLES,
    PARCEL,
    PARCEL_CODEC,
    REJECTED,
    ROUTE,
    SERVER_ROUND,
    ranked,
)
from flwr_distill.protocol.outliers import absurdly_large, update_norm
from flwr_distill.protocol.parcels import asked_codec, from_payload, to_payload
from flwr_distill.strategies.common.ensemble import EnsembleDistillation
from flwr_distill.strategies.common.robust import FEWEST, Rule, robust_mean, trimmed
from flwr_distill.strategies.fedhead.method import (
    GLOBAL_MODEL,
    LEADS,
    LONGEST,
    MIN_GAIN,
    RULE,
    SECTOR_MODEL,
    UPDATE_NORM,
)

LONGER = 1.001
"""Times the norm that a member reported which its model may have."""
OWN = 0
"""Rank of the leader's own model; members' ranks start at 1."""
CODED = "coded-model"
"""Blob with the trained model as it is sent, where it is coded."""
MEMBERS = "sector-members"
SENT_AT_ONCE = 8
"""Members that a leader sends to at the same time; each costs the memory of a sealed model."""


class StoredModel(Mapping[str, NDArray[Any]]):
    """Arrays of a model in a file, read on each access instead of kept."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __getitem__(self, name: str) -> NDArray[Any]:
        with safe_open(self._file, "numpy") as arrays:
            array: NDArray[Any] = arrays.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        with safe_open(self._file, "numpy") as arrays:
            return iter(list(arrays.keys()))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True)
class SectorMean:
    """Mean of a sector's models."""

    arrays: Arrays
    """w_m."""
    rejected: Mapping[int, str]
    """Reasons for rejected models, by rank; 0 is the leader's own."""


def train_sector(message: Message, context: Context) -> Message:
    """Train the received model; if not the leader, send it to the leader (step 1)."""
    deadline = deadline_of(message)
    session, content = Session.of(context), message.content
    start = _global_model(session, content)
    local = LocalRound.of(session, content, start)
    trained = local.train(session.data.train)
    # The model that counts is the one that others get: all have the same, and its norm is theirs.
    own = check_arrays(arrays_of(local.model), start)
    payload = to_payload(own, asked_codec(content), start)
    arrays = from_payload(payload, MAX_PARCEL, start)
    norm = update_norm(check_arrays(arrays, start), start)
    trained.metric_records[METRICS][UPDATE_NORM] = norm
    session.store.write(_file(OWN), save(dict(arrays)))
    if PARCEL_CODEC in content.config_records:
        session.store.write(CODED, payload)
    if not content.config_records[CONFIG].get(LEADS):
        trained.update(_send_trained(session, content, deadline))
    return Message(trained, reply_to=message)


def hand_in(message: Message, context: Context) -> Message:
    """Send the stored trained model to the sector's new leader (step 1)."""
    deadline = deadline_of(message)
    sent = _send_trained(Session.of(context), message.content, deadline)
    return Message(sent, reply_to=message)


def hand_out(message: Message, context: Context) -> Message:
    """Store the global model as members get it, and send it to every one with a route (step 5).

    The reply has a ``parcel.<rank>`` for each member that was reached; failures are logged. Members
    are sent to side by side, so that one that does not answer costs the others nothing.
    """
    deadline = deadline_of(message)
    session = Session.of(context)
    model = received_arrays(message.content)
    payload = to_payload(model, asked_codec(message.content))
    # Coded, it is another model: updates that start from two could not be compared.
    session.store.write(GLOBAL_MODEL, save(dict(from_payload(payload, MAX_PARCEL))))
    routes = ranked(message.content.config_records, ROUTE)

    def send_to(rank: int) -> ConfigRecord | None:
        try:
            return send(session, routes[rank], payload, deadline)
        except LinkError as error:
            log(WARNING, "Cannot send the model to member %d: %s", rank, error)
            return None

    with ThreadPoolExecutor(SENT_AT_ONCE) as pool:
        receipts = dict(zip(routes, pool.map(send_to, routes), strict=True))
    parcels = {f"{PARCEL}.{rank}": parcel for rank, parcel in receipts.items() if parcel}
    return Message(RecordDict({**parcels}), reply_to=message)


def aggregate_sector(message: Message, context: Context) -> Message:
    """Reply with the mean of the sector's models (step 2)."""
    mean = mean_of_sector(Session.of(context), message.content)
    reasons = ConfigRecord({f"{REJECTED}.{rank}": why for rank, why in mean.rejected.items()})
    content = RecordDict({ARRAYS: as_record(mean.arrays), CONFIG: reasons})
    return Message(content, reply_to=message)


def distill_sector(message: Message, context: Context) -> Message:
    """Distil the sector's ensemble into the received model, and reply with that (step 4).

    Without a model, where the ensemble does not predict this node's samples better by the share
    that the server asks for.
    """
    session = Session.of(context)
    require_no_privacy(session.task.train, "distillation on a leader's data (FedHEAD)")
    config = dict(message.content.config_records[CONFIG])
    server_round, least_gain = config.pop(SERVER_ROUND), float(str(config.pop(MIN_GAIN)))
    request = EnsembleDistillation.checked(config, "message")
    student = build_model(session, received_arrays(message.content))
    distilled = distil_sector(session, student, request, int(str(server_round)), least_gain)
    if distilled is None:
        metrics = MetricRecord({"distill-epochs": 0})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)
    metrics = MetricRecord({"distill-loss": distilled.loss, "distill-epochs": distilled.epochs})
    arrays = ArrayRecord(student.state_dict())
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)


def mean_of_sector(session: Session, content: RecordDict) -> SectorMean:
    """Mean of the leader's and members' models, ``w_m = sum_k (p_km / p_m) w_km`` (step 2).

    Or a robust one, by the server's rule. `content` has ``delivery.<rank>`` of each member, from 1.
    Its config has ``num-examples.<rank>``, the ``update-norm.<rank>`` that each reported to the
    server, the rule, and the longest update that counts. Rank 0 is the leader's own model in its
    store, if it trained one. Raises ValueError if no model is usable.
    """
    config = content.config_records[CONFIG]
    counts = {rank: int(str(count)) for rank, count in ranked(config, NUM_EXAMPLES).items()}
    start = _start(session)
    norms = {}
    if OWN in counts:
        norms[OWN] = update_norm(check_arrays(_stored(session, OWN), start), start)
    rejected = {}
    for rank, delivery in ranked(content.config_records, DELIVERY).items():
        try:
            arrays = received_model(session, delivery, SECTOR_MODEL, start)
            norms[rank] = update_norm(check_arrays(arrays, start), start)
        except Exception as error:  # hostile bytes make the reader raise all sorts
            rejected[rank] = one_line(error) or type(error).__name__
            continue
        session.store.write(_file(rank), save(dict(arrays)))
    claims = {rank: float(str(norm)) for rank, norm in ranked(config, UPDATE_NORM).items()}
    for rank in absurdly_large(norms, session.task.norm_threshold):
        rejected[rank] = "its norm is beyond norm-threshold"
    for rank, norm in norms.items():  # else a member could have the server refuse the mean
        if session.task.norm_threshold and norm > LONGER * claims.get(rank, norm):
            rejected[rank] = f"its norm is {norm:.3g}, and it reported {claims[rank]:.3g}"
    norms = {rank: norm for rank, norm in norms.items() if rank not in rejected}
    rule: Rule = config.get(RULE, "mean")  # type: ignore[assignment]
    models = [StoredModel(session.store.folder / _file(rank)) for rank in norms]
    longest: float = config.get(LONGEST, math.inf)  # type: ignore[assignment]
    mean, kept = robust_mean(rule, [counts[rank] for rank in norms], models, start, longest)
    weights = dict(zip(norms, kept.tolist(), strict=True))
    unused = [rank for rank, weight in weights.items() if not weight]
    rejected |= dict.fromkeys(unused, f"it is not one of those that {rule} takes")
    members = {
        SERVER_ROUND: config[SERVER_ROUND],
        RULE: rule,
        "weights": [(rank, weight) for rank, weight in weights.items() if weight],
    }
    session.store.write(MEMBERS, json.dumps(members).encode())
    return SectorMean(mean, rejected)


def distil_sector(
    session: Session,
    student: nn.Module,
    request: EnsembleDistillation,
    server_round: int,
    least_gain: float = 0.0,
) -> Distilled | None:
    """Distil the sector's ensemble into `student`, in place, on the leader's data (step 4).

    The teacher is ``sum_k (p_km / p_m) f(x; w_km)`` over the models of `mean_of_sector`, with its
    weights; trimmed where that mean was. Returns None if the teacher's loss on the samples is not
    lower by the share `least_gain`, so that nothing was distilled.

    Raises ValueError if the node did not aggregate its sector in this round.
    """
    file = session.store.folder / MEMBERS
    members = json.loads(file.read_bytes()) if file.exists() else {}
    if members.get(SERVER_ROUND) != server_round:
        raise ValueError(f"this node has no sector's models of round {server_round}")
    inputs = session.data.train.inputs
    models = _models(session, members["weights"])
    is_trimmed = members[RULE] == "trimmed-mean" and len(members["weights"]) >= FEWEST
    cut = trimmed(len(members["weights"])) if is_trimmed else 0
    teacher = teacher_probabilities(models, inputs, average=request.average, cut=cut)
    if least_gain:
        gain = saving(teacher, student, inputs, session.data.train.labels)
        if gain < least_gain:
            log(INFO, "Not distilled: the ensemble would save %.0f%% of the loss", 100 * gain)
            return None
    draws = session.generator("distill-sector", server_round)
    distilled = distil_ensemble(student, inputs, teacher, **request.arguments, generator=draws)
    log(INFO, "Distilled %s: %s", counted(len(members["weights"]), "model"), distilled)
    return distilled


def _send_trained(session: Session, content: RecordDict, deadline: float) -> RecordDict:
    """Send the stored model along the message's ``route``.

    If sending fails, the result reports the error instead of raising it: the training is not lost,
    as another leader can still get the model.
    """
    name = CODED if PARCEL_CODEC in content.config_records else _file(OWN)
    payload = (session.store.folder / name).read_bytes()
    try:
        return RecordDict({PARCEL: send(session, content.config_records[ROUTE], payload, deadline)})
    except LinkError as error:
        return RecordDict({CONFIG: ConfigRecord({LINK_ERROR: str(error)})})


def _global_model(session: Session, content: RecordDict) -> Arrays:
    """The global model: from the message, from the leader, or a leader's own copy.

    Every node stores it, because any may become leader and then measures updates against it.

    Raises LinkError if the leader's parcel cannot be opened.
    """
    if content.array_records:
        arrays = received_arrays(content)
    elif DELIVERY in content.config_records:
        arrays = received_model(session, content.config_records[DELIVERY], GLOBAL_MODEL)
    else:
        return load((session.store.folder / GLOBAL_MODEL).read_bytes())
    session.store.write(GLOBAL_MODEL, save(dict(arrays)))
    return arrays


def _models(
    session: Session, weights: Iterable[tuple[int, float]]
) -> Iterator[tuple[float, nn.Module]]:
    """Weight and model of each node of the sector; reuses one model's memory."""
    model = session.new_model().to(session.device)
    for rank, weight in weights:
        load_arrays(model, _stored(session, rank))
        yield weight, model


def _start(session: Session) -> Arrays:
    """The model before training in this round, or an arbitrary one if the node has none."""
    payload = session.store.read(GLOBAL_MODEL)
    if payload is None:
        return arrays_of(session.new_model())
    return load(payload)


def _stored(session: Session, rank: int) -> Arrays:
    return load((session.store.folder / _file(rank)).read_bytes())


def _file(rank: int) -> str:
    return f"{SECTOR_MODEL}-{rank}"
