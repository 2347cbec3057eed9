"""Virtual images that a node distils of its samples, to train on them in their place."""

from functools import lru_cache
from logging import INFO

import torch
from flwr.common import log
from torch import Tensor

from flwr_distill.client.local_data import LocalData
from flwr_distill.distill.distribution_matching import REFINE_BANK, Network, distill_dm
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.datasets import Samples
from flwr_distill.task.settings import VirtualSettings

TRAINED_ON = "virtual-training-data"


def first_images(
    data: LocalData, settings: VirtualSettings, generator: torch.Generator, device: torch.device
) -> VirtualData:
    """Distil a node's training samples with random networks (FedLGD, algorithm 1, start)."""
    return _matched(data, settings, generator, device, steps=settings.first_steps)


def refined_images(
    data: LocalData,
    settings: VirtualSettings,
    generator: torch.Generator,
    device: torch.device,
    *,
    steps: int,
    images: Tensor,
    network: Network,
) -> VirtualData:
    """Match class means in a network's features, from virtual images at hand (FedLGD eq. 1)."""
    return _matched(
        data,
        settings,
        generator,
        device,
        steps=steps,
        network=network,
        bank=REFINE_BANK,
        initial_images=images,
    )


def _matched(
    data: LocalData,
    settings: VirtualSettings,
    generator: torch.Generator,
    device: torch.device,
    *,
    steps: int,
    network: Network | None = None,
    bank: int | None = None,
    initial_images: Tensor | None = None,
) -> VirtualData:
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
        bank=bank,
        network=network,
        initial_images=initial_images,
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
        virtual = first_images(data, settings, generator, device)
        log(INFO, "Made %d virtual images to train on", len(virtual))
        payload = virtual.to_bytes()
        store.write(TRAINED_ON, payload)
    return _decoded(payload, device)


@lru_cache(maxsize=16)  # one object for all messages: features of a frozen network are its
def _decoded(payload: bytes, device: torch.device) -> Samples:
    return samples_of(VirtualData.from_bytes(payload), device)


def samples_of(virtual: VirtualData, device: torch.device) -> Samples:
    """Virtual images as they are trained on, the smaller ones in each enlarged."""
    decoded = virtual.decoded()
    return Samples(decoded.images, decoded.labels).to(device)
