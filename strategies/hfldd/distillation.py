"""A node's virtual data; in a simulation, those of several virtual nodes at once."""

import zlib
from dataclasses import replace
from logging import INFO, WARNING
from typing import NamedTuple

import torch
from flwr.app import Context
from flwr.common import log
from torch import nn

from flwr_distill.client.features import seen_data
from flwr_distill.client.private_distillation import distil_privately
from flwr_distill.client.session import Session, own_file, virtual_per_class
from flwr_distill.client.simulation import in_simulation, locked, session_of
from flwr_distill.client.terms import extractor
from flwr_distill.distill.auto import choose
from flwr_distill.distill.distribution_matching import REFINE_BANK, distill_dm
from flwr_distill.distill.formation import best_formation
from flwr_distill.distill.kip import Descent
from flwr_distill.distill.many import distill_many
from flwr_distill.distill.own_network import network_arguments
from flwr_distill.distill.registry import caution_of
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.messages import REAL_PER_VIRTUAL
from flwr_distill.strategies.hfldd.requests import Distillation, Refinement

BATCH = 10
"""Virtual nodes of a simulation for which a process distils in one call."""


class Encoded(NamedTuple):
    """Virtual data as they are sent, and the object if it is there without decoding them."""

    payload: bytes
    made: VirtualData | None = None
    """Before its pixels were rounded."""

    def virtual(self) -> VirtualData:
        """The data; their pixels may be those before rounding."""
        return self.made or VirtualData.from_bytes(self.payload)


def distilled(context: Context, request: Distillation) -> Encoded:
    """Distil a node's training data, once per run: ``distilled_size`` samples with a privacy card.

    In a simulation every process can load every partition, and on a GPU distilling many small sets
    at once costs little more than one. There the first message distils for a batch of partitions,
    and the other nodes of the batch read the results, which are the same but for rounding.
    """
    session = Session.of(context)
    if request.dp_epsilon or not _in_batches(context, session):
        name = f"distilled-{_digest(request)}"
        if (payload := session.store.read(name)) is not None:
            return Encoded(payload)
        if request.dp_epsilon:
            made = distil_privately(
                session,
                epsilon=request.dp_epsilon,
                per_class=_per_class(session, request),
                steps=request.distill_steps or None,
                formation=request.formation,
            )
        else:
            (made,) = _distil([session], request)
        payload = made.to_bytes(request.bits)
        session.store.write(name, payload)
        return Encoded(payload, made)
    shared = replace(
        session.store, folder=session.store.folder.parent / f"distilled-{_digest(request)}"
    )
    own, number = session.identity, int(context.node_config["num-partitions"])
    batches = -(-number // BATCH)
    with locked(shared.folder / f".lock-{own % batches}"):
        if str(own) not in shared.names():
            partitions = range(own % batches, number, batches)
            sessions = [session_of(context, partition) for partition in partitions]
            for other, virtual in zip(sessions, _distil(sessions, request), strict=True):
                shared.write(str(other.identity), virtual.to_bytes(request.bits))
    return Encoded((shared.folder / str(own)).read_bytes())


def _in_batches(context: Context, session: Session) -> bool:
    """Whether to distil for many nodes: on a CPU that saves nothing, and workers would wait."""
    return session.device.type != "cpu" and in_simulation(context)


def refined(
    session: Session, model: nn.Module, payload: bytes, request: Distillation, how: Refinement
) -> Encoded:
    """Continue a node's virtual data with the features of the global model (FedLGD eq. 1)."""
    data, virtual = seen_data(session), VirtualData.from_bytes(payload)
    result = distill_dm(
        data.train.inputs,
        data.train.labels,
        num_classes=data.spec.num_classes,
        per_class=_per_class(session, request),
        init=request.start,
        steps=how.steps,
        generator=session.generator("refine", how.server_round),
        device=session.device,
        network=extractor(model, session.task.train.feature_layer),
        bank=REFINE_BANK,
        initial_images=virtual.images,
        formation=virtual.formation,
    )
    result = replace(result, soft_labels=virtual.soft_labels)
    result = result.with_card(data.train.inputs, data.holdout.inputs)
    return Encoded(result.to_bytes(request.bits), result)


def _distil(sessions: list[Session], request: Distillation) -> list[VirtualData]:
    """Distil for nodes of one run; those with as many samples of a class in one batch."""
    distiller = _distiller(sessions[0], request)
    own_network = network_arguments(
        distiller,
        request.network,
        own_file(sessions[0].node_config, request.network_weights),
        sessions[0].device,
    )
    sharing: dict[int, list[Session]] = {}
    for session in sessions:
        sharing.setdefault(_per_class(session, request), []).append(session)
    made = {}
    for per_class, alike in sharing.items():
        for session in alike if distiller == "auto" else ():
            _log_choice(session)
        results = distill_many(
            distiller,
            [(data.train.inputs, data.train.labels) for data in map(seen_data, alike)],
            num_classes=alike[0].data.spec.num_classes,
            per_class=per_class,
            init=request.start,
            steps=request.distill_steps or None,
            generators=[s.generator("distill") for s in alike],
            device=alike[0].device,
            formation=request.formation,
            descent=_descent(request),
            **own_network,
        )
        for session, virtual in zip(alike, results, strict=True):
            data = seen_data(session)
            made[session.identity] = virtual.with_card(data.train.inputs, data.holdout.inputs)
    for warning in sorted({caution_of(virtual.method) for virtual in made.values()} - {""}):
        log(WARNING, "Distilled: %s", warning)
    return [made[session.identity] for session in sessions]


def _descent(request: Distillation) -> Descent:
    """How KIP minimises eq. 1."""
    return Descent(request.kip_lr, request.kip_batch_size, request.kip_lambda, request.kip_relative)


def _log_choice(session: Session) -> None:
    spec, held = seen_data(session).spec, len(torch.unique(session.data.train.labels))
    method, reason = choose(held, spec.num_classes, spec.shape)
    log(INFO, "Distiller auto takes %s: %s", method, reason)


def _distiller(session: Session, request: Distillation) -> str:
    """The distiller; ``auto`` takes none that the node's owner would not let leave."""
    bounded = int(session.node_config.get(REAL_PER_VIRTUAL, 1)) > 1
    return "dm" if bounded and request.distiller == "auto" else request.distiller


def _per_class(session: Session, request: Distillation) -> int:
    """Virtual samples of each class on a node."""
    num_present = len(torch.unique(session.data.train.labels))
    wanted = max(1, request.distilled_size // num_present)
    if request.dp_epsilon:
        return wanted
    formation = request.formation or best_formation(seen_data(session).spec.shape)
    return virtual_per_class(session, wanted, formation)


def _digest(request: Distillation) -> str:
    return f"{zlib.crc32(request.model_dump_json().encode()):08x}"
