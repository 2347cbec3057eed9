"""FedDM: the server trains on virtual data that nodes distil around the global model."""

import copy
from collections.abc import Iterable
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn import functional

from distill.errors import VirtualDataError
from distill.virtual_data import Bounds, VirtualData
from protocol.arrays import Arrays, arrays_of, as_record, as_tensors
from protocol.feddm import DISTILL_AROUND, VIRTUAL_DATA, FedDMSettings
from protocol.meeting import one_line
from protocol.messages import TRAIN_LOSS
from protocol.replies import usable
from strategies.common.checked import CheckedFedAvg
from strategies.common.draws import round_generator
from strategies.common.images import require_images
from task.datasets import DataSpec
from task.words import counted


class FedDM(CheckedFedAvg):
    """Iterative distribution matching (Xiong et al. 2023).

    In each round nodes make virtual data that match the means of their own, class by class, in the
    features and logits of models around the global one
    (:func:`distill.perturbed_matching.distill_around`). They send these in place of a model. The
    server trains the global model on all of them, and no farther from where it was than `radius`.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    spec : DataSpec
        Shape and classes of the images.
    per_class, radius, distill_steps, server_epochs, server_lr, server_batch_size
        See `protocol.feddm.FedDMSettings`.
    seed : int (default: 0)
        Seed of the order of the server's minibatches.
    device : torch.device or str (default: "cpu")
        Where the server trains.
    **kwargs
        As Flower's FedAvg takes them.

    Raises
    ------
    SettingsError
        If a setting is out of range, or the data are no images.

    Notes
    -----
    Nodes start anew from noise with the mean and deviation of each class in every round, as the
    published code does from plain noise.
    """

    run_arguments = ("model", "spec", "seed", "device")

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: DataSpec,
        per_class: int = 10,
        radius: float = 5.0,
        distill_steps: int = 200,
        server_epochs: int = 100,
        server_lr: float = 0.01,
        server_batch_size: int = 256,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_images(spec, "feddm")
        self.settings = FedDMSettings.checked(
            {
                "per-class": per_class,
                "radius": radius,
                "distill-steps": distill_steps,
                "server-epochs": server_epochs,
                "server-lr": server_lr,
                "server-batch-size": server_batch_size,
            },
            "feddm",
        )
        self._spec = spec
        self._model = copy.deepcopy(model).to(device)
        self._device = device
        self._seed = seed
        self._order: dict[int, int] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes distil their data around the model."""
        request = ConfigRecord(self.settings.around_model.model_dump(by_alias=True))
        sampled = super().configure_train(server_round, arrays, config, grid)
        self._order = {node: place for place, node in enumerate(grid.get_node_ids())}
        messages = []
        for message in sampled:
            message.content[DISTILL_AROUND] = request
            messages.append(Message(message.content, message.metadata.dst_node_id, DISTILL_AROUND))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train the global model on the usable virtual data."""
        virtual = []
        by_node = {reply.metadata.src_node_id: reply for reply in usable(replies)}
        # Minibatches hang on the order, which must not be that of replies or of random ids.
        for node in sorted(by_node, key=lambda node: self._order.get(node, len(self._order))):
            try:
                virtual.append(self._data_of(by_node[node]))
            except ValueError as error:
                self.set_aside(by_node[node], one_line(error))
        if not virtual:
            log(WARNING, "Round %d: no usable data, the global model stays", server_round)
            return None, None
        images = torch.cat([data.images for data in virtual])
        labels = torch.cat([data.labels for data in virtual])
        nodes = counted(len(virtual), "node")
        log(INFO, "FedDM: %d virtual images of %s", len(labels), nodes)
        arrays, loss = self._trained(images.to(self._device), labels.to(self._device), server_round)
        return as_record(arrays), MetricRecord({TRAIN_LOSS: loss})

    def _data_of(self, reply: Message) -> VirtualData:
        """A node's virtual data, no more than were asked for.

        Raises
        ------
        ValueError
            If they are malformed, too many or do not fit the task.
        """
        record = reply.content.config_records.get(VIRTUAL_DATA, ConfigRecord())
        payload = record.get("payload", b"")
        each, classes = self.settings.per_class, self._spec.num_classes
        bounds = Bounds(self._spec.shape, classes, classes * each, each)
        if not isinstance(payload, bytes):
            raise VirtualDataError("it sent no virtual data")
        return VirtualData.received(payload, bounds)

    def _trained(self, images: Tensor, labels: Tensor, server_round: int) -> tuple[Arrays, float]:
        """The global model after some epochs on the data, and the mean loss of the last epoch."""
        model, settings = self._model, self.settings
        model.load_state_dict(as_tensors(self.start_of_round))
        start = [weight.detach().clone() for weight in model.parameters()]
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.server_lr)
        generator = round_generator(self._seed, server_round)
        total = torch.zeros((), device=images.device)
        for _ in range(settings.server_epochs):
            total.zero_()
            order = torch.randperm(len(labels), generator=generator).to(images.device)
            for rows in torch.split(order, settings.server_batch_size):
                if len(rows) == 1 < len(order):  # batch normalisation cannot train on one
                    continue
                optimizer.zero_grad(set_to_none=True)
                loss = functional.cross_entropy(model(images[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                stay_within(list(model.parameters()), start, settings.radius)
                total += loss.detach() * len(rows)
        return arrays_of(model), float(total) / len(labels)


@torch.no_grad()
def stay_within(weights: list[nn.Parameter], start: list[Tensor], radius: float) -> None:
    """Move weights back, in place, to the ball around a start (FedDM).

    Parameters
    ----------
    weights, start : list of Tensor
        One for each parameter, in the same order.
    radius : float
        Greatest norm of all changes together.
    """
    moved = [w - s for w, s in zip(weights, start, strict=True)]
    length = torch.stack([m.square().sum() for m in moved]).sum().sqrt()
    scale = (radius / length.clamp_min(1e-12)).clamp(max=1.0)
    for weight, begin, move in zip(weights, start, moved, strict=True):
        weight.copy_(begin + scale * move)
