"""Base of methods whose server trains the global model on virtual data of the nodes."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.base.text import counted
from flwr_distill.distill.errors import VirtualDataError
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.distill.virtual_header import Bounds
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.arrays import Arrays, arrays_of, as_record, load_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import TRAIN_LOSS
from flwr_distill.protocol.replies import usable
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.draws import round_generator
from flwr_distill.strategies.common.images import require_images
from flwr_distill.task.datasets import DataSpec

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits (n, classes) and labels (n,)."""


class VirtualTraining(CheckedFedAvg):
    """Nodes send virtual data in place of models, and the server trains the model on them.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    spec : DataSpec
        Shape and classes of the images.
    seed : int (default: 0)
        Seed of the order of the server's minibatches.
    device : torch.device or str (default: "cpu")
        Where the server trains.
    **kwargs
        Settings, which must have ``per_class``, virtual images of each class on a node, and
        ``server_epochs``, ``server_lr`` and ``server_batch_size`` of the server's SGD; and what
        Flower's FedAvg takes.

    Attributes
    ----------
    name : str
        The strategy's, as in the run config.

    Raises
    ------
    SettingsError
        If the data are no images.
    """

    run_arguments: ClassVar[tuple[str, ...]] = ("model", "spec", "seed", "device")
    name: ClassVar[str]

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: DataSpec,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_images(spec, self.name)
        self.spec, self.device = spec, device
        self._model = copy.deepcopy(model).to(device)
        self._seed = seed
        self._order: dict[int, int] = {}

    @abstractmethod
    def requests(self, sampled: list[Message], grid: Grid) -> list[Message]:
        """Messages that ask nodes for virtual data, given FedAvg's train messages to them."""

    def loss(self) -> Loss:
        """The loss that the server minimises in a round."""
        return functional.cross_entropy

    def after_step(self, weights: list[nn.Parameter], start: list[Tensor]) -> None:
        """Change weights in place after a step, given those at the start of the round."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the sampled nodes for virtual data."""
        sampled = list(super().configure_train(server_round, arrays, config, grid))
        self._order = {node: place for place, node in enumerate(grid.get_node_ids())}
        return self.requests(sampled, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train the global model on the usable virtual data."""
        virtual = []
        for reply in self.in_order(usable(replies)):
            try:
                virtual.append(self._data_of(reply))
            except ValueError as error:
                self.set_aside(reply, one_line(error))
        if not virtual:
            log(WARNING, "Round %d: no usable data, the global model stays", server_round)
            return None, None
        images = torch.cat([data.images for data in virtual])
        labels = torch.cat([data.labels for data in virtual])
        nodes = counted(len(virtual), "node")
        log(INFO, "%s: %d virtual images of %s", type(self).__name__, len(labels), nodes)
        arrays, loss = self._trained(images.to(self.device), labels.to(self.device), server_round)
        return as_record(arrays), MetricRecord({TRAIN_LOSS: loss})

    def in_order(self, replies: Iterable[Message]) -> list[Message]:
        """Replies in the order of the nodes, which is neither theirs nor that of random ids.

        Minibatches hang on it, and the last bits of sums.
        """
        last = len(self._order)
        return sorted(replies, key=lambda r: self._order.get(r.metadata.src_node_id, last))

    def _data_of(self, reply: Message) -> VirtualData:
        """A node's virtual data, no more than requested.

        Raises ValueError if they are malformed, too many or do not fit the task.
        """
        record = reply.content.config_records.get(VIRTUAL_DATA, ConfigRecord())
        payload = record.get("payload", b"")
        each, classes = self.settings.per_class, self.spec.num_classes
        bounds = Bounds(self.spec.shape, classes, classes * each, each)
        if not isinstance(payload, bytes):
            raise VirtualDataError("it sent no virtual data")
        return VirtualData.received(payload, bounds)

    def _trained(self, images: Tensor, labels: Tensor, server_round: int) -> tuple[Arrays, float]:
        """The global model after some epochs on the data, and the mean loss of the last epoch."""
        settings = self.settings
        model, loss_of = self._model, self.loss()
        load_arrays(model, self.start_of_round)
        start = [weight.detach().clone() for weight in model.parameters()]
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.server_lr)
        generator = round_generator(self._seed, server_round)
        total = torch.zeros((), device=images.device)
        for _ in range(settings.server_epochs):
            total.zero_()
            order = torch.randperm(len(labels), generator=generator).to(images.device)
            for rows in torch.split(order, settings.server_batch_size):
                if len(rows) == 1 < min(len(order), settings.server_batch_size):
                    # Batch normalisation cannot train on one.
                    continue
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(model(images[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                self.after_step(list(model.parameters()), start)
                total += loss.detach() * len(rows)
        return arrays_of(model), float(total) / len(labels)
