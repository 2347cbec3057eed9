"""Hostile nodes: our ClientApp, which lies where an attack says so."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Context, Message, RecordDict
from safetensors.numpy import load, save
from torch import Tensor, nn
from torch.nn.functional import one_hot

from flwr_distill.client.session import Session
from flwr_distill.client.training import Trained, train_round
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.links import send
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES, SERVER_ROUND
from flwr_distill.simulation.grid import Node
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR, DISTILL_SECTOR
from flwr_distill.strategies.hfldd.distillation import Encoded, distilled
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.datasets import Samples

CLAIM = 992
"""Times its samples that a node claims: just below what screening calls absurd."""
DEVIATIONS = 1.5
"""z of "A little is enough" in its experiments on MNIST; its z_max is 0 for 2 of 10 nodes."""
OVERSIZED_IMAGES = 10_000
OVERSIZED_BYTES = 2**26
TARGET = 0
"""Class that the backdoor's trigger calls for."""
TRIGGER = 2
"""Side of the trigger in pixels, a bright square in the lower right corner."""


class Attack(StrEnum):
    """What hostile nodes do.

    Sources: "A little is enough" is Baruch et al. 2019; model replacement Bagdasaryan et al. 2020.
    """

    NONE = "none"
    NAN = "NaN"
    LONG = "x 1000"
    REVERSED = "reversed"
    REVERSED_AND_INFLATED = "reversed, samples x 992"
    A_LITTLE = "a little is enough"
    FLIPPED_LABELS = "flipped labels"
    FLIPPED_VIRTUAL_DATA = "flipped virtual data"
    RANDOM_VIRTUAL_DATA = "random virtual data"
    OVERSIZED_PARCEL = "oversized parcel"
    LYING_LEADER = "lying leader"
    REVERSING_LEADER = "reversing leader"
    FREE_RIDER = "free rider"
    BACKDOOR = "backdoor"


_ONLY: Mapping[Attack, Collection[str]] = {
    Attack.FLIPPED_VIRTUAL_DATA: ("hfldd",),
    Attack.RANDOM_VIRTUAL_DATA: ("hfldd",),
    Attack.OVERSIZED_PARCEL: ("hfldd", "fedhead"),
    Attack.LYING_LEADER: ("fedhead",),
    Attack.REVERSING_LEADER: ("fedhead",),
}


def is_possible(attack: Attack, strategy: str) -> bool:
    """Whether nodes of the strategy do what the attack falsifies."""
    return strategy in _ONLY.get(attack, (strategy,))


@dataclass
class Ring:
    """The hostile nodes of a run, which know what all nodes before them trained in the round.

    Parameters
    ----------
    attack : Attack
        What they do.
    share : float
        Their share of all nodes.
    """

    attack: Attack
    share: float
    _round: int = 0
    _trained: list[Mapping[str, Tensor]] = field(default_factory=list)

    def observed(self, node: Node) -> Node:
        """An honest node, whose trained models the ring sees."""

        def answer(message: Message) -> RecordDict | None:
            self._begin(message)
            with patch("flwr_distill.client.local_round.train_round", self._noted):
                return node(message)

        return answer

    def hostile(self, node: Node) -> Node:
        """A node of the ring."""
        start: dict[str, Any] = {}

        def answer(message: Message) -> RecordDict | None:
            self._begin(message)
            if ARRAYS in message.content.array_records:
                start.update(as_arrays(message.content.array_records[ARRAYS]))
            with ExitStack() as patches:
                for target, replacement in self._replaced().items():
                    patches.enter_context(patch(target, replacement))
                content = node(message)
            if content is not None:
                self._falsify(message.metadata.message_type, content, start)
            return content

        return answer

    def _begin(self, message: Message) -> None:
        config: Mapping[str, Any] = message.content.config_records.get(CONFIG, {})
        if (number := config.get(SERVER_ROUND, self._round)) != self._round:
            self._round = number
            self._trained.clear()

    def _replaced(self) -> Mapping[str, Callable[..., Any]]:
        """What stands in for functions of our ClientApp, by their names."""
        match self.attack:
            case Attack.FLIPPED_LABELS:
                return {"flwr_distill.client.session.Session.of": _with_flipped_labels}
            case Attack.NAN:  # else our own client would refuse to send it
                return {
                    "flwr_distill.client.local_round.train_round": self._spoiled,
                    "flwr_distill.strategies.fedhead.client.check_arrays": lambda arrays, like: (
                        arrays
                    ),
                }
            case Attack.FLIPPED_VIRTUAL_DATA:
                return {"flwr_distill.strategies.hfldd.client.distilled": _flipped_virtual_data}
            case Attack.RANDOM_VIRTUAL_DATA:
                return {"flwr_distill.strategies.hfldd.client.distilled": _random_virtual_data}
            case Attack.OVERSIZED_PARCEL:
                return {
                    "flwr_distill.strategies.hfldd.client.distilled": _oversized_virtual_data,
                    "flwr_distill.strategies.fedhead.client.send": _send_oversized,
                    "flwr_distill.links.records.Waybill.check_size": lambda waybill, size: None,
                }
        return {"flwr_distill.client.local_round.train_round": self._spoiled}

    def _noted(self, model: nn.Module, *args: Any, **kwargs: Any) -> Trained:
        trained = train_round(model, *args, **kwargs)
        self._trained.append(_copied(model))
        return trained

    def _spoiled(self, model: nn.Module, samples: Samples, *args: Any, **kwargs: Any) -> Trained:
        start = _copied(model)
        if self.attack is Attack.BACKDOOR:
            samples = _with_triggers(samples)
        trained = self._noted(model, samples, *args, **kwargs)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(self.spoil(start[name], [known[name] for known in self._trained]))
        return trained

    def spoil(self, start: Tensor, trained: list[Tensor]) -> Tensor:
        """An array that a hostile node sends.

        Parameters
        ----------
        start : Tensor
            Before training.
        trained : list[Tensor]
            As the nodes so far trained it, the hostile node's own last.
        """
        own = trained[-1]
        match self.attack:
            case Attack.NAN:
                return own * torch.nan
            case Attack.LONG:
                return start + 1000 * (own - start)
            case Attack.REVERSED | Attack.REVERSED_AND_INFLATED:
                return start - (own - start)
            case Attack.A_LITTLE:
                known = torch.stack(trained)
                return known.mean(0) + DEVIATIONS * known.std(0, correction=0)
            case Attack.FREE_RIDER:
                return start
            case Attack.BACKDOOR:  # the mean over all nodes becomes the ring's model
                return start + (own - start) / self.share
        return own

    def _falsify(self, message_type: str, content: RecordDict, start: Mapping[str, Any]) -> None:
        """Change a reply in place; `start` is the model that the node got last."""
        metrics: Any = content.metric_records.get(METRICS, {})
        if self.attack is Attack.REVERSED_AND_INFLATED and NUM_EXAMPLES in metrics:
            metrics[NUM_EXAMPLES] *= CLAIM
        if message_type not in (AGGREGATE_SECTOR, DISTILL_SECTOR):
            return
        models: dict[str, Any] = as_arrays(content.array_records[ARRAYS])
        for name, value in models.items():
            if value.dtype.kind == "f" and self.attack is Attack.LYING_LEADER:
                models[name] = -1e6 * value
            if value.dtype.kind == "f" and self.attack is Attack.REVERSING_LEADER:
                models[name] = start[name] - (value - start[name])
        content[ARRAYS] = as_record(models)


def with_trigger(images: Tensor) -> Tensor:
    """Images (n, C, H, W) with the backdoor's trigger, as bright as the brightest pixel."""
    images = images.clone()
    images[..., -TRIGGER:, -TRIGGER:] = images.max()
    return images


def _with_triggers(samples: Samples) -> Samples:
    """Samples, and each of them again with the trigger and its class."""
    target = torch.full((len(samples),), TARGET)
    if samples.labels.ndim == 2:
        target = one_hot(target, samples.labels.shape[1])
    labels = torch.cat([samples.labels, target.to(samples.labels)])
    return Samples(torch.cat([samples.inputs, with_trigger(samples.inputs)]), labels)


_honest_session = Session.of


def _with_flipped_labels(context: Context) -> Session:
    """The node's session, with class y of C as C - 1 - y."""
    session = _honest_session(context)
    train = session.own.train
    flipped = Samples(train.inputs, session.own.spec.num_classes - 1 - train.labels)
    return replace(session, own=replace(session.own, train=flipped))


def _flipped_virtual_data(context: Context, request: Distillation) -> Encoded:
    num_classes = Session.of(context).data.spec.num_classes
    honest = distilled(context, request).virtual()
    soft = None if honest.soft_labels is None else honest.soft_labels.flip(1)
    flipped = replace(honest, labels=num_classes - 1 - honest.labels, soft_labels=soft)
    return Encoded(flipped.to_bytes(), flipped)


def _random_virtual_data(context: Context, request: Distillation) -> Encoded:
    return _noise(context, len(distilled(context, request).virtual()))


def _oversized_virtual_data(context: Context, request: Distillation) -> Encoded:
    return _noise(context, OVERSIZED_IMAGES)


def _noise(context: Context, size: int) -> Encoded:
    """Well-formed virtual data: noise with random labels."""
    session = Session.of(context)
    spec, draws = session.data.spec, session.generator("attack")
    images = torch.randn(size, *spec.shape, generator=draws)
    labels = torch.randint(spec.num_classes, (size,), generator=draws)
    noise = VirtualData(images, labels, "noise", steps=0, seed=0, init="noise")
    return Encoded(noise.to_bytes(), noise)


def _send_oversized(session: Session, route: Any, payload: bytes, deadline: float) -> Any:
    more = {"more": torch.zeros(OVERSIZED_BYTES // 4).numpy()}
    return send(session, route, save({**load(payload), **more}), deadline)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
