"""VHL on nodes: the virtual task, learned beside the node's own samples."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, repeat
from typing import Self

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import server_round
from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm
from flwr_distill.client.training import epoch_batches, hard_labels
from flwr_distill.distill.contrastive import supervised_contrastive_loss
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.task.auxiliary_names import NOISE
from flwr_distill.task.datasets import DataSpec, Samples, auxiliary_images
from flwr_distill.task.settings import TrainSettings
from flwr_distill_baselines.vhl.generator import style_images
from flwr_distill_baselines.vhl.method import VIRTUAL_TASK, VirtualTaskRequest


class VirtualTask(LossTerm):
    """Loss of a minibatch of virtual images (Tang et al. 2022, eq. 6; weights of the public code).

    ``weight`` times their cross-entropy; ``alignment`` times the supervised contrastive loss over
    the features of both minibatches, in which virtual ones are constants; ``contrast`` times that
    of the virtual ones alone.

    Parameters
    ----------
    model : nn.Module
        In training. Virtual images are a second forward pass, with their own statistics in batch
        normalisation.
    virtual : Samples
        All virtual images, on the model's device.
    generator : torch.Generator
        CPU generator of the order.
    layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    """

    def __init__(
        self,
        model: nn.Module,
        virtual: Samples,
        request: VirtualTaskRequest,
        generator: torch.Generator,
        layer: str = "",
    ) -> None:
        self._model = model
        self._virtual = virtual
        self._request = request
        self._batches: Iterator[Tensor] = chain.from_iterable(
            epoch_batches(virtual.labels, request.virtual_batch, generator) for _ in repeat(None)
        )
        self._features = Features(model, layer)

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term of a message with VHL's record."""
        require_no_privacy(settings, "VHL's alignment of samples")
        request = VirtualTaskRequest.checked(content.config_records[VIRTUAL_TASK], "message")
        make = MAKERS[request.images]
        virtual = make(session.data.spec, request.per_class, request.seed)
        config = content.config_records.get(CONFIG, ConfigRecord())
        generator = session.generator("virtual-task", server_round(config))
        return cls(model, virtual.to(session.device), request, generator, settings.feature_layer)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value; soft labels count as their likeliest class."""
        own = self._features.last.flatten(1)
        images, classes = self._virtual.minibatch(next(self._batches), inputs.device)
        loss = self._request.weight * functional.cross_entropy(self._model(images), classes)
        virtual = self._features.last.flatten(1)
        aligned = supervised_contrastive_loss(
            torch.cat([own, virtual.detach()]), torch.cat([hard_labels(labels), classes])
        )
        apart = supervised_contrastive_loss(virtual, classes)
        return loss + self._request.alignment * aligned + self._request.contrast * apart


def virtual_images(spec: DataSpec, per_class: int, seed: int) -> Samples:
    """The shared virtual images: smooth noise around a smooth pattern of their class.

    (num_classes * per_class, C, H, W) sorted by class, of mean 0 and deviation about 1. Equal seeds
    give equal images on every node.
    """
    classes = spec.num_classes
    noise = auxiliary_images(NOISE, spec, classes * (1 + per_class), seed)
    patterns = noise[:classes].repeat_interleave(per_class, dim=0)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return Samples((patterns + noise[classes:]) / 2**0.5, labels)


MAKERS: Mapping[str, Callable[[DataSpec, int, int], Samples]] = {
    "noise": virtual_images,
    "stylegan": lru_cache(maxsize=1)(style_images),  # the same in each round
}
