"""Virtual images that a node distils of its samples, to train on them in their place."""

from functools import lru_cache
from logging import INFO

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from torch import Tensor

from flwr_distill.client.local_data import LocalData
from flwr_distill.distill.distribution_matching import REFINE_BANK, Network, distill_dm
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.datasets import Samples
from flwr_distill.task.settings import VirtualSettings

TRAINED_ON = "virtual-training-data"


def virtual_images(
    data: LocalData,
    settings: VirtualSettings,
    generator: torch.Generator,
    device: torch.device,
    *,
    steps: int,
    refined: Tensor | None = None,
    network: Network | None = None,
) -> VirtualData:
    """Distil a node's training samples with random networks (FedLGD, algorithm 1, start).

    With a `network`, match class means in its features, from the images `refined` (FedLGD eq. 1).
    """
    return distill_dm(
        data.train.inputs,
        data.train.labels,
        num_classes=data.spec.num_classes,
        per_class=settings.per_class,
        init=settings.starts_from,
        steps=steps,
        generator=generator,
        device=device,
        formation=settings.formation,
        bank=None if network is None else REFINE_BANK,
        network=network,
        initial_images=refined,
        means_of=settings.means_of,
        optimizer=settings.image_optimizer,
    )


def trained_on(
    data: LocalData,
    settings: VirtualSettings,
    generator: torch.Generator,
    device: torch.device,
    store: NodeStore,
) -> Samples:
    """The node's virtual images, made once in a run, and then read from its store."""
    payload = store.read(TRAINED_ON)
    if payload is None:
        virtual = virtual_images(data, settings, generator, device, steps=settings.first_steps)
        log(INFO, "Made %d virtual images to train on", len(virtual))
        payload = virtual.to_bytes()
        store.write(TRAINED_ON, payload)
    return _decoded(payload, device)


@lru_cache(maxsize=16)  # one object for all messages: features of a frozen network are its
def _decoded(payload: bytes, device: torch.device) -> Samples:
    return samples_of(VirtualData.from_bytes(payload), device)


def virtual_reply(virtual: VirtualData, data: LocalData) -> RecordDict:
    """A reply with virtual data of a node's samples, not sealed, and with their privacy card."""
    virtual = virtual.with_card(data.train.inputs, data.holdout.inputs)
    card = virtual.card.numbers() if virtual.card else {}
    metrics = MetricRecord({NUM_EXAMPLES: len(data.train), **card})
    return RecordDict(
        {METRICS: metrics, VIRTUAL_DATA: ConfigRecord({"payload": virtual.to_bytes()})}
    )


def samples_of(virtual: VirtualData, device: torch.device) -> Samples:
    """Virtual images as they are trained on, the smaller ones in each enlarged."""
    decoded = virtual.decoded()
    return Samples(decoded.images, decoded.labels).to(device)
