"""HFLDD on nodes: soft labels, members' virtual data, and the pool that a head trains on."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from torch import Tensor, nn
from torch.nn.functional import one_hot

from flwr_distill.client.auxiliary import auxiliary_of
from flwr_distill.client.dp_sgd import PrivacyAccount, PrivateTraining, require_no_privacy
from flwr_distill.client.features import as_seen, seen_data
from flwr_distill.client.local_round import LocalRound, build_model, received_arrays
from flwr_distill.client.session import Session, deadline_of, own_file
from flwr_distill.client.training import soft_labels
from flwr_distill.distill.audited import audited
from flwr_distill.distill.errors import VirtualDataError
from flwr_distill.distill.own_network import network_arguments
from flwr_distill.distill.registry import formation_arguments
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.distill.virtual_header import Bounds
from flwr_distill.links import LinkError, send
from flwr_distill.links import receive as open_parcel
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    PARCEL,
    REJECTED,
    ROUTE,
    ranked,
)
from flwr_distill.strategies.common.images import require_images
from flwr_distill.strategies.hfldd.distillation import Encoded, distilled, refined
from flwr_distill.strategies.hfldd.method import (
    KEPT_PARCELS,
    KNOWN,
    NUM_PARCELS,
    OWN_DIVERGENCE,
    RANKS,
    REFINEMENT,
    SOFT_LABELS,
    VOTER,
    VOTES,
    HFLDDSettings,
)
from flwr_distill.strategies.hfldd.requests import (
    Distillation,
    LabelRequest,
    ParcelBounds,
    PoolRequest,
    Refinement,
)
from flwr_distill.task.auxiliary_names import NOISE
from flwr_distill.task.backbones import seen_spec
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import outputs

PREFIX = "parcel-"
REFINED = "refined-data"
MIN_TO_HALVE = 4
"""Samples; batch normalisation cannot train on one."""
COMPARED = 200
"""Auxiliary samples on which halves of a node's data are compared: only their mean counts."""
SMALLEST_PROBABILITY = 1e-10
"""As in the KL matrix."""

FileState = tuple[Path, int]
"""A file and its time of modification in ns."""


def needs(session: Session, settings: HFLDDSettings) -> Iterator[Callable[[], object]]:
    """Calls that fail where the node is missing distiller or auxiliary set, or has texts."""
    spec = seen_spec(session.new_model(), session.own.spec, session.task.train)
    yield partial(require_images, spec, "hfldd", or_tables=True)
    yield partial(formation_arguments, settings.distiller, settings.formation)
    yield lambda: network_arguments(
        settings.distiller,
        settings.network,
        own_file(session.node_config, settings.network_weights),
    )
    if settings.auxiliary != NOISE:
        yield partial(auxiliary_of, session, settings.auxiliary, settings.auxiliary_size)


def label_knowledge(message: Message, context: Context) -> Message:
    """Reply with soft labels on the global auxiliary set (step 1)."""
    session = Session.of(context)
    request = LabelRequest.checked(message.content.config_records[CONFIG], "message")
    auxiliary = auxiliary_of(session, request.auxiliary, request.auxiliary_size)
    auxiliary = auxiliary.to(session.device)
    train = seen_data(session).train
    privacy = PrivateTraining.of(session, session.task.train)

    def labels_of(samples: Samples, auxiliary: Tensor, purpose: str) -> Tensor:
        model = session.new_model()
        model.to(session.device)
        return soft_labels(
            model,
            samples,
            as_seen(session, auxiliary),
            steps=request.initial_steps,
            lr=request.initial_lr,
            batch_size=request.initial_batch_size,
            generator=session.generator(purpose),
            privacy=privacy,
        )

    metrics = MetricRecord({NUM_EXAMPLES: len(train)})
    if request.own_divergence and len(train) >= MIN_TO_HALVE and not session.task.train.dp_noise:
        order = torch.randperm(len(train), generator=session.generator("halves"))
        halves = order.to(train.labels.device).chunk(2)
        first, second = (
            labels_of(train.subset(half), auxiliary[:COMPARED], f"half {i}")
            for i, half in enumerate(halves)
        )
        metrics[OWN_DIVERGENCE] = _divergence(first, second)
    arrays = ArrayRecord({SOFT_LABELS: labels_of(train, auxiliary, "label-knowledge")})
    if privacy:
        metrics.update(privacy.account.numbers(len(train)))
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)


def distill(message: Message, context: Context) -> Message:
    """Distil the node's data and send them to its cluster head (step 4)."""
    deadline = deadline_of(message)
    session = Session.of(context)
    request = Distillation.checked(message.content.config_records[CONFIG], "message")
    require_images(seen_data(session).spec, "hfldd", or_tables=True)
    if not request.dp_epsilon:
        require_no_privacy(session.task.train, "distillation with hfldd.dp-epsilon = 0")
    encoded = _virtual_data(message.content, context, request)
    virtual = encoded.virtual()
    log(INFO, "Distilled %d samples by %s", len(virtual.labels), virtual.method)
    found = audited(virtual, session.data.train.labels)
    if found:
        log(WARNING if found.alarming else INFO, "By the audit, %s", found)
    account = PrivacyAccount.of(session, session.task.train)
    metrics = MetricRecord(
        {
            NUM_EXAMPLES: len(virtual.labels),
            "num-values": virtual.images.numel(),
            **(virtual.card.numbers() if virtual.card else {}),
            **(found.numbers() if found else {}),
            **(account.numbers(len(session.data.train)) if request.dp_epsilon else {}),
        }
    )
    parcel = send(session, message.content.config_records[ROUTE], encoded.payload, deadline)
    return Message(RecordDict({PARCEL: parcel, METRICS: metrics}), reply_to=message)


def _virtual_data(content: RecordDict, context: Context, request: Distillation) -> Encoded:
    """The node's last virtual data, refined first where the message says so; or its raw data."""
    session = Session.of(context)
    if request.share_raw_data:
        raw = _raw_as_virtual(seen_data(session).train, session.task.seed)
        return Encoded(raw.to_bytes(), raw)
    # Those that an earlier run, which this one resumes, has refined have no differential privacy.
    last = None if request.dp_epsilon else session.store.read(REFINED)
    encoded = Encoded(last) if last else distilled(context, request)
    if REFINEMENT not in content.config_records:
        return encoded
    if request.dp_epsilon:  # the server refuses this too, but data are refined here
        raise SettingsError(
            "refined virtual data would have no differential privacy",
            where="hfldd.dp-epsilon",
            value=request.dp_epsilon,
            remedy="set hfldd.refresh-every to 0",
        )
    how = Refinement.checked(content.config_records[REFINEMENT], "message")
    model = build_model(session, received_arrays(content))
    encoded = refined(session, model, encoded.payload, request, how)
    session.store.at(how.server_round).write(REFINED, encoded.payload)
    return encoded


def receive(message: Message, context: Context) -> Message:
    """Open and store the members' virtual data (step 4)."""
    session = Session.of(context)
    config = message.content.config_records
    most = ParcelBounds.checked(config[CONFIG], "message")
    parcels = ranked(config, PARCEL)
    kept = [rank for rank, record in parcels.items() if keep_parcel(session, rank, record, most)]
    pool = [len(parcel) * parcel.formation**2 for rank, parcel in _parcels(session).items()]
    metrics = MetricRecord(
        {
            NUM_EXAMPLES: len(session.data.train) + sum(pool),
            KEPT_PARCELS: kept,
            REJECTED: len(parcels) - len(kept),
        }
    )
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def train_pool(message: Message, context: Context) -> Message:
    """Train the received model on D_h: the head's own data and its members' virtual data."""
    session = Session.of(context)
    local = LocalRound.of(session, message.content)
    how = PoolRequest.checked(message.content.config_records[CONFIG], "message")
    generator = session.generator("virtual", how.server_round)
    samples = pooled_samples(session, how.left_out, how.virtual_share, generator)
    reply = local.train(samples, balanced=how.balanced, average_last=how.average_last)
    reply[ARRAYS] = local.trained_model()
    reply.metric_records[METRICS][NUM_PARCELS] = len(_files(session))
    return Message(reply, reply_to=message)


def vote(message: Message, context: Context) -> Message:
    """Say how well other heads' models know the virtual data of some members."""
    session = Session.of(context)
    config, records = message.content.config_records[CONFIG], message.content.array_records
    stored = _parcels(session)
    parcels = [stored[rank].decoded() for rank in _numbers(config, RANKS)]
    voters = [
        (
            build_model(session, as_arrays(records[f"{VOTER}.{i}"])).eval(),
            _numbers(config, f"{KNOWN}.{i}"),
        )
        for i in range(len(records))
    ]
    votes = [knows(model, classes, parcel) for parcel in parcels for model, classes in voters]
    return Message(RecordDict({METRICS: MetricRecord({VOTES: votes})}), reply_to=message)


def knows(model: nn.Module, classes: Iterable[int], parcel: VirtualData) -> float:
    """Share of the other classes that a model finds less likely than the label, in [0, 1].

    It is the mean over those of `classes` that the parcel contains, so that a rare one counts as
    much as any; 1 if it contains none.
    """
    device = next(model.parameters()).device
    logits = outputs(model, parcel.images, device).double().cpu()
    labels = parcel.labels if parcel.soft_labels is None else parcel.soft_labels.argmax(1)
    of_labels = logits.gather(1, labels[:, None])
    lower = (logits < of_labels).sum(1) + ((logits == of_labels).sum(1) - 1) / 2
    shares = lower / max(logits.shape[1] - 1, 1)
    of_class = [shares[labels == label].mean() for label in classes if label in labels]
    return float(torch.stack(of_class).mean()) if of_class else 1.0


def _numbers(config: ConfigRecord, key: str) -> list[int]:
    numbers = config.get(key, [])
    return [int(number) for number in numbers] if isinstance(numbers, list) else []


def _divergence(first: Tensor, second: Tensor) -> float:
    """Symmetric Kullback-Leibler divergence between soft labels, in nats."""
    first, second = (labels.double().clamp_min(SMALLEST_PROBABILITY) for labels in (first, second))
    return float(((first - second) * (first.log() - second.log())).sum(1).mean() / 2)


def keep_parcel(session: Session, rank: int, parcel: ConfigRecord, most: ParcelBounds) -> bool:
    """Open a member's parcel, check its virtual data and store them; False if it is rejected.

    The member's rank in its cluster orders the pool, which must not depend on Flower's random ids.
    """
    spec = seen_data(session).spec
    try:
        payload = open_parcel(session, parcel, VIRTUAL_DATA)
        bounds = Bounds(spec.shape, spec.num_classes, most.images, most.of_a_class, most.formation)
        virtual = VirtualData.received(payload, bounds)
    except (LinkError, VirtualDataError) as error:
        log(WARNING, "Parcel from node %s rejected: %s", parcel.get("sender"), error)
        return False
    name = f"{PREFIX}{rank:06d}"
    session.store.at(most.server_round).write(name, payload)
    if file := session.store.file(name):
        _decoded(session.store.folder)[rank] = _state(file), virtual
    return True


def pooled_samples(
    session: Session,
    left_out: Collection[int] = (),
    share: float = 1.0,
    generator: torch.Generator | None = None,
) -> Samples:
    """D_h on the head's device: its training samples and a share of its members' virtual data.

    `left_out` are ranks of members whose virtual data are not used.
    """
    own = seen_data(session).train
    parcels = [parcel for rank, parcel in _parcels(session).items() if rank not in left_out]
    if not parcels:
        return own
    received = _joined(tuple(parcels))
    if share < 1:
        order = torch.randperm(len(received), generator=generator)
        received = received.subset(order[: round(share * len(received))])
    received = received.to(own.inputs.device)
    if received.labels.ndim == 2:
        own = replace(own, labels=one_hot(own.labels, session.data.spec.num_classes).float())
    return own.with_more(received)


def _parcels(session: Session) -> dict[int, VirtualData]:
    """The members' last virtual data in the store, by rank; each file is decoded once."""
    known, parcels = _decoded(session.store.folder), {}
    for rank, file in _files(session).items():
        state = _state(file)
        if rank not in known or known[rank][0] != state:
            known[rank] = state, VirtualData.from_bytes(file.read_bytes())
        parcels[rank] = known[rank][1]
    return parcels


def _files(session: Session) -> dict[int, Path]:
    """Files of the members' last virtual data, by rank."""
    names = {name.partition("@")[0] for name in session.store.names() if name.startswith(PREFIX)}
    files = {int(name.removeprefix(PREFIX)): session.store.file(name) for name in sorted(names)}
    return {rank: file for rank, file in files.items() if file is not None}


def _state(file: Path) -> FileState:
    return file, file.stat().st_mtime_ns


@lru_cache(maxsize=4)
def _decoded(folder: Path) -> dict[int, tuple[FileState, VirtualData]]:
    """Virtual data in a store by rank, with the state of their files; filled by others."""
    return {}


@lru_cache(maxsize=4)
def _joined(parcels: tuple[VirtualData, ...]) -> Samples:
    """What networks are trained on, of all parcels."""
    parcels = tuple(parcel.decoded() for parcel in parcels)
    labels = [parcel.labels for parcel in parcels]
    soft = [parcel.soft_labels for parcel in parcels if parcel.soft_labels is not None]
    if soft:  # if any labels are learned distributions, all must be distributions
        labels = [
            one_hot(parcel.labels, soft[0].shape[1]).float()
            if parcel.soft_labels is None
            else parcel.soft_labels
            for parcel in parcels
        ]
    return Samples(torch.cat([parcel.images for parcel in parcels]), torch.cat(labels))


def _raw_as_virtual(samples: Samples, seed: int) -> VirtualData:
    """The "w/o DD" ablation: raw samples in place of virtual ones."""
    return VirtualData(
        images=samples.inputs.cpu(),
        labels=samples.labels.cpu(),
        method="raw",
        steps=0,
        seed=seed,
        init="real",
    )
