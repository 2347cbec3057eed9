"""FedLGD: training on virtual data of nodes and server, which are refined along the way."""

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import nn

from flwr_distill.base.text import counted
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.private_matching import check_shape
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.arrays import (
    Arrays,
    as_tensors,
    finite_arrays,
    load_arrays,
    model_arrays,
    sent_arrays,
)
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS
from flwr_distill.protocol.replies import usable
from flwr_distill.strategies.agreement.strategy import Agreement
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import RobustFedAvg, Update
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.images import chosen_formation, require_images
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.virtual_files import virtual_files
from flwr_distill.strategies.fedlgd.method import (
    GLOBAL_DATA,
    GRADIENT,
    NEEDS_GLOBAL_DATA,
    TRAIN_VIRTUAL,
    VIRTUAL,
    FedLGDSettings,
    GlobalData,
    VirtualTraining,
)
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import VirtualSettings


class FedLGD(RobustFedAvg):
    """Local and global distillation against domain shift (FedLGD).

    Nodes never train on their own samples, but on ``per_class`` virtual images per class, distilled
    by distribution matching. In selected rounds nodes refine these with the global model's features
    (eq. 1) and train on them; then the server refines virtual data of its own, which start as
    noise, until the global model's gradient on them points along the nodes' mean gradient (eq.
    5-6). In the other rounds nodes train on both sets together, with a supervised contrastive term
    over both (eq. 2-4). A node gets the server's virtual data once after each change.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    spec : DataSpec
        Shape and classes of what nodes train on (`task.backbones.seen_spec`).
    phase_timeout : float (default: 600.0)
        Seconds to wait for nodes that lost the server's virtual data.
    seed : int (default: 0)
        Seed of the noise.
    device : torch.device or str (default: "cpu")
        Where the server distils.
    **kwargs
        Settings (`strategies.fedlgd.method.FedLGDSettings`), and what `RobustFedAvg` takes.

    Notes
    -----
    Source: "Federated Learning on Virtual Heterogeneous Data with Local-Global Dataset
    Distillation". A node that fails, or sends arrays that are not finite, is left out of the round.
    """

    settings: FedLGDSettings = FedLGDSettings()
    run_arguments = (
        *("model", "spec", "device", "phase_timeout", "seed", "directory", "aggregator"),
    )

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: DataSpec,
        phase_timeout: float = 600.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        directory: Directory | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.formation = chosen_formation("fedlgd.formation", self.settings.formation, spec.shape)
        self.phase_timeout = phase_timeout
        self.global_data: VirtualData | None = None
        """The server's virtual data, as nodes have them; None before the first selected round."""
        each = self.settings.global_per_class
        self._start_of_global_data = _noise(spec, each, self.formation, seed)
        self._model = copy.deepcopy(model).to(device)
        self._device = device
        self._payload = b""
        self._directory = directory or Directory()
        self._holders: set[int] = set()
        self._selected = False
        self._content: RecordDict

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run; SettingsError if settings exclude each other."""
        if run.train.on == "virtual":
            raise SettingsError(
                "nodes distil their virtual images of real samples, by fedlgd.*",
                where="train.on",
                value=run.train.on,
                remedy='set it to "real"',
            )
        require_images(run.seen_spec, "fedlgd", or_tables=True)
        if settings.dp_epsilon and run.seen_spec != run.spec:
            raise SettingsError(
                "nothing but the head of the frozen network trains, and features have no "
                "differential privacy here",
                where="fedlgd.dp-epsilon",
                value=settings.dp_epsilon,
                remedy='leave it out, or set backbone.trains to "last-block"',
            )
        if settings.dp_epsilon:
            check_shape(run.spec.shape, "fedlgd.dp-epsilon", settings.dp_epsilon)
        return super().from_run(settings, run, **{"spec": run.seen_spec, **arguments})

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> FedLGD settings:")
        settings = self.settings
        selected = settings.every, settings.selections
        log(INFO, "\t│\t├── Selected: every %d rounds, %d times", *selected)
        log(INFO, "\t│\t├── Nodes: %d images a class", settings.per_class)
        log(INFO, "\t│\t└── Server: %d steps, to the %s", settings.global_steps, settings.match)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes refine their virtual data and train, or train on both sets."""
        config = ConfigRecord({**config})
        sampled = super().configure_train(server_round, arrays, config, grid)
        turn, rest = divmod(server_round - 1, self.settings.every)
        self._selected = rest == 0 and turn < self.settings.selections
        request = ConfigRecord(self._request().model_dump(by_alias=True))
        self._content = RecordDict({ARRAYS: arrays, CONFIG: config, VIRTUAL: request})
        return [self._message(message.metadata.dst_node_id) for message in sampled]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the nodes' models; in a selected round refine the server's virtual data."""
        replies = self._with_retries(usable(replies))
        return super().aggregate_train(server_round, replies)

    def read(self, reply: Message) -> Update:
        """Read a reply; in a selected round check its gradient too."""
        if self._asks_for_gradients:
            model_arrays(sent_arrays(reply, GRADIENT), self._matched(self.start_of_round))
        return super().read(reply)

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models; in a selected round refine the server's virtual data."""
        if not self._selected:
            return super().combine(updates)
        start = self._matched(self.start_of_round)
        if self.settings.match == "gradient":
            target, updates = self._mean_gradient(updates, start)
            mean = super().combine(updates)
        else:
            mean = super().combine(updates)
            target = {name: np.subtract(array, mean[name]) for name, array in start.items()}
        self._refine(target)
        return mean

    def _mean_gradient(self, updates: list[Update], like: Arrays) -> tuple[Arrays, list[Update]]:
        """Mean of the nodes' gradients, and the updates of those that count."""
        gradients = [
            replace(update, arrays=finite_arrays(sent_arrays(update.reply, GRADIENT)))
            for update in updates
        ]
        if not isinstance(self.aggregator, Agreement):
            return weighted_mean((each.num_examples, each.arrays) for each in gradients), updates
        zeros = {name: np.zeros_like(array) for name, array in like.items()}
        self.aggregator.grid = self.grid
        mean, agreeing = self.aggregator.average(gradients, zeros, "gradient")
        nodes = {update.node for update in agreeing}
        return mean, [update for update in updates if update.node in nodes]

    def artifacts(self) -> dict[str, bytes]:
        """Files of the run's result: the server's virtual data, and a picture of them."""
        return virtual_files(self._payload, self._directory.class_name)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {**super().state_dict(), "global-data": self._payload}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self._replace(state["global-data"])

    @property
    def _asks_for_gradients(self) -> bool:
        return self._selected and self.settings.match == "gradient"

    def _request(self) -> VirtualTraining:
        """The round's request to nodes."""
        settings, joint = self.settings, not self._selected and self.global_data is not None
        of_nodes = settings.model_dump(include=set(VirtualSettings.model_fields))
        return VirtualTraining(
            **{**of_nodes, "formation": self.formation},
            refine_steps=settings.refine_steps if self._selected else 0,
            contrast=settings.contrast if joint else 0.0,
            regulariser=settings.regulariser,
            gradient=self._matched_names() if self._asks_for_gradients else [],
            dp_epsilon=settings.dp_epsilon,
        )

    def _message(self, node: int) -> Message:
        """The round's message, with the server's virtual data if the node has none."""
        content = RecordDict({**self._content})
        if self._payload and not self._selected:
            data = GlobalData(
                digest=hashlib.sha256(self._payload).hexdigest(),
                payload=b"" if node in self._holders else self._payload,
            )
            content[GLOBAL_DATA] = ConfigRecord(data.model_dump(by_alias=True))
            self._holders.add(node)
        return Message(content, node, TRAIN_VIRTUAL)

    def _with_retries(self, replies: list[Message]) -> list[Message]:
        """Replies, after resending the server's virtual data to nodes that lost them."""
        missing = [
            reply.metadata.src_node_id
            for reply in replies
            if NEEDS_GLOBAL_DATA in reply.content.metric_records.get(METRICS, MetricRecord())
        ]
        if not missing:
            return replies
        nodes = counted(len(missing), "node")
        log(INFO, "The server sends its virtual data again to %s", nodes)
        self._holders.difference_update(missing)
        messages = [self._message(node) for node in missing]
        again = usable(self.grid.send_and_receive(messages, timeout=self.phase_timeout))
        answered = {reply.metadata.src_node_id for reply in again}
        self._holders.difference_update(set(missing) - answered)
        return [reply for reply in replies if reply.metadata.src_node_id not in missing] + again

    def _matched(self, arrays: Arrays) -> Arrays:
        """The arrays by which gradients are matched."""
        return {name: arrays[name] for name in self._matched_names()}

    def _matched_names(self) -> list[str]:
        weights = self._model.named_parameters()
        return [name for name, w in weights if w.ndim > 1 and w.requires_grad]

    def _refine(self, target: Arrays) -> None:
        """Match the gradient at the round's initial model (eq. 5-6)."""
        load_arrays(self._model, self.start_of_round)
        virtual, steps = self.global_data or self._start_of_global_data, self.settings.global_steps
        try:
            images = match_gradient(
                virtual.images.to(self._device),
                virtual.labels.to(self._device),
                as_tensors(target),
                self._model,
                steps=steps,
                formation=virtual.formation,
                optimizer=self.settings.image_optimizer,
            )
            refined = replace(virtual, images=images.cpu(), steps=virtual.steps + steps)
        except DistillError as error:
            log(WARNING, "The server's virtual data stay as they are: %s", error)
            return
        self._replace(refined.to_bytes())

    def _replace(self, payload: bytes) -> None:
        """Replace the virtual data; decode them as nodes do, with 8 bits per pixel."""
        self._payload, self._holders = payload, set()
        self.global_data = VirtualData.from_bytes(payload) if payload else None


def _noise(spec: DataSpec, per_class: int, formation: int, seed: int) -> VirtualData:
    """Initial virtual data of the server, which has no real images to start from."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(spec.num_classes).repeat_interleave(per_class)
    images = torch.randn(len(labels), *spec.shape, generator=generator)
    return VirtualData(
        images, labels, method="gm", steps=0, seed=seed, init="noise", formation=formation
    )
