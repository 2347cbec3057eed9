"""A network that was trained on something else, with a linear head for the run's classes."""

import copy
import hashlib
import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.augmentation import chosen_changes
from flwr_distill.task.backbones.low_rank import LowRank, add_low_rank
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError
from flwr_distill.task.settings import TrainSettings

STRIDE = 32
REACH = math.sqrt(0.5)
"""Of random Fourier features of features with norm 1, of which most are about 1 apart."""
MIN_SIDE = 128
"""Side of small images after enlargement."""
NEARLY_ALL = 0.9
"""Share of a network's weights with which a part is more than a block."""


class RandomFourier(nn.Module):
    """``cos(W x + b)`` with random W and b (Rahimi and Recht 2007).

    Products of features approximate ``exp(-|x - y|^2 / 2 reach^2)``, times half their number.

    Parameters
    ----------
    inputs, width : int
        Numbers of an input, and features.
    reach : float, optional (default: None)
        Distance at which inputs count as far apart; None for the root of `inputs`, which suits
        numbers of variance 1.
    """

    def __init__(self, inputs: int, width: int, reach: float | None = None) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(width, inputs) / (reach or math.sqrt(inputs)))
        self.phases = nn.Parameter(2 * math.pi * torch.rand(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (n, width) of inputs (n, ...)."""
        return torch.cos(nn.functional.linear(inputs.flatten(1), self.waves, self.phases))


class Frozen(nn.Module):
    """A frozen network and a linear head on its features, which have norm 1.

    Only the head trains, but for `thaw`. The network stays in evaluation mode, and sees images with
    the channels, size and normalisation of its training.

    The state (`state_dict`) has only what trains, so a run sends no more. The frozen part comes
    with the model's settings; loading changes it only if it is in the loaded state.

    Parameters
    ----------
    network : nn.Module
        Maps images (n, channels, size, size) to features (n, width), or (n, width, 1, 1).
    width : int
        Number of features.
    spec : DataSpec
        Of the run's images; grey ones are shown in all channels.
    size : int, optional (default: None)
        Side to which images are scaled; None leaves them unchanged.
    mean, std : tuple of float, optional (default: None)
        By channel, of the pixels in [0, 1] that the network was trained on; None for the run's.
    tail : str (default: "")
        Name of the module in `network` that begins its last block; empty for the last part with
        dense or convolutional layers.
    interpolation : str (default: "bilinear")
        By which images are scaled: ``bilinear``, ``bicubic`` or ``nearest``. The first two average
        where images shrink.
    """

    def __init__(
        self,
        network: nn.Module,
        width: int,
        spec: DataSpec,
        *,
        size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        tail: str = "",
        interpolation: str = "bilinear",
    ) -> None:
        super().__init__()
        self.scale: Tensor
        self.shift: Tensor
        self.network = network.requires_grad_(False)
        self.fourier: RandomFourier | None = None
        self.head = nn.Linear(width, spec.num_classes)
        self.vector_shape = (width, 1, 1)
        self._length = math.sqrt(width)
        self._size = size
        self._interpolation = interpolation
        self._tail = tail or _last_part(network)
        self._shape = spec.shape
        self._check_width(width)
        self._channels = len(mean) if mean else spec.shape[0]
        mean, std = mean or spec.mean, std or spec.std
        if spec.shape[0] not in (1, self._channels):
            raise ModelError(
                f"its network takes {self._channels}-channel images, the run's have "
                f"{spec.shape[0]}",
                remedy="use images of one channel or as many as the network's",
            )
        # (p - m) / s of the run, to (p - mean) / std
        scale = _by_channel(spec.std) / _by_channel(std)
        shift = (_by_channel(spec.mean) - _by_channel(mean)) / _by_channel(std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.register_state_dict_post_hook(_leave_out_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_fill_in_frozen)  # type: ignore[no-untyped-call]
        self.train()

    def train(self, mode: bool = True) -> "Frozen":
        """Set the mode of the head; the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        for module in self.network.modules():
            if isinstance(module, LowRank):  # Opacus takes gradients of layers in training mode
                module.up.train(mode)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, classes) of images as the run normalises them, or of their `vectors`."""
        known = inputs.shape[1:] == self.vector_shape
        features = inputs.flatten(1) / self._length if known else self.features(inputs)
        logits: Tensor = self.head(features)
        return logits

    def vectors(self, inputs: Tensor) -> Tensor:
        """Features of images as what a run trains on in their place, (n, width, 1, 1).

        Their mean square is 1, as that of normalised pixels.
        """
        return self.as_vectors(self.features(inputs))

    def as_vectors(self, features: Tensor) -> Tensor:
        """Features (n, width) as `vectors`."""
        return (features * self._length)[..., None, None]

    def features(self, inputs: Tensor) -> Tensor:
        """Features (n, width) of images as the run normalises them."""
        features = functional.normalize(self.network(self._as_shown(inputs)).flatten(1))
        return features if self.fourier is None else functional.normalize(self.fourier(features))

    def _as_shown(self, inputs: Tensor) -> Tensor:
        """Images as the network sees them."""
        images = inputs.expand(-1, self._channels, -1, -1) * self.scale + self.shift
        if self._size is None:
            return images
        return _scaled(images, self._size, self._interpolation)

    @property
    def shown(self) -> dict[str, Tensor]:
        """How images are prepared for the network: side (0 for unchanged), scale, shift, mode."""
        return {
            "side": torch.tensor(self._size or 0),
            "scale": self.scale,
            "shift": self.shift,
            "interpolation": torch.tensor(list(self._interpolation.encode())),
        }

    @property
    def trained(self) -> bool:
        """Whether a part of the network trains, so that features change."""
        return any(weight.requires_grad for weight in self.network.parameters())

    def frozen_state(self) -> dict[str, Tensor]:
        """State that training leaves unchanged: weights, and statistics of batch normalisation."""
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        state = self.network.state_dict(prefix="network.")
        if self.fourier is not None:
            state |= self.fourier.state_dict(prefix="fourier.")
        return {name: value for name, value in state.items() if name not in trained}

    def widen(self, count: int) -> None:
        """Replace the features by `count` random Fourier features of them, which stay frozen.

        They are drawn from torch's global generator.
        """
        self._check_width(count)
        self.fourier = RandomFourier(self.head.in_features, count, REACH).requires_grad_(False)
        self.head = nn.Linear(count, self.head.out_features)
        self.vector_shape, self._length = (count, 1, 1), math.sqrt(count)

    def resize(self, side: int) -> None:
        """Scale images to another side for the network."""
        if self._size is None:
            raise ModelError("its network takes images of the run's size alone")
        self._size = side

    def _check_width(self, width: int) -> None:
        if self._shape == (width, 1, 1):
            raise ModelError(
                f"a frozen network of {width} features cannot tell them from samples of {width} "
                "numbers",
                remedy="use another number of features",
            )

    def thaw(self, part: str) -> None:
        """Let ``last-block`` or ``all`` of the network train, too; ``head`` is neither."""
        chosen, tail = part == "all", f"{self._tail}." if self._tail else ""
        for name, weight in self.network.named_parameters():
            chosen = chosen or (part == "last-block" and name.startswith(tail))
            weight.requires_grad_(chosen)

    def adapt(self, rank: int) -> None:
        """Let low-rank updates of the network's layers train, and the head; see `LowRank`.

        They are drawn from torch's global generator, and leave the network's outputs as they are.
        """
        add_low_rank(self.network, rank, self._as_shown(torch.zeros(2, *self._shape)))
        self.train(self.training)

    def load_network(self, file: Path) -> None:
        """Load the network's weights from a safetensors file; a head in the file is not used.

        Counts of batches may be missing, as in torchvision's ResNets: PyTorch takes them for 0.
        """
        try:
            own, state = self.network.state_dict().keys(), load_file(file)
            known = {name: value for name, value in state.items() if name in own}
            missing = self.network.load_state_dict(known, strict=False).missing_keys
        except (OSError, SafetensorError) as error:
            problem, remedy = f"cannot be read ({error})", "use a safetensors file on this machine"
        except RuntimeError as error:
            problem, remedy = f"does not fit the network: {' '.join(str(error).split())}", ""
        else:
            if not missing:
                return
            problem, remedy = (
                f"is missing {missing[0]!r}",
                "use the file that belongs to the network",
            )
        raise ModelError(problem, where="backbone.weights", value=str(file), remedy=remedy)


def seen_spec(model: nn.Module, spec: DataSpec, train: TrainSettings) -> DataSpec:
    """Spec of the samples that training sees: `spec`, or that of a frozen network's `vectors`.

    It is the latter where only its head trains, and images are not changed at random.
    """
    if not isinstance(model, Frozen) or model.trained or chosen_changes(train.augment, spec):
        return spec
    labels = replace(spec.labels, columns=())
    shape = model.vector_shape
    return replace(spec, shape=shape, mean=(0.0,), std=(1.0,), kind="table", labels=labels)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the initial state that nobody sends; empty if there is none.

    For a `Frozen` model it is the network, trained or not, and its preparation of images; for
    others the state without gradients.
    """
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    state = whole_state(model)
    if isinstance(model, Frozen):
        trained = {f"head.{name}" for name in model.head.state_dict()}
        state |= model.shown
    elif trained == {name for name, _ in model.named_parameters()}:
        return ""
    digest = hashlib.sha256()
    for name, value in state.items():
        if name not in trained:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def copy_to_train(model: nn.Module) -> nn.Module:
    """A copy of a model, which shares its frozen part."""
    known: dict[int, object] = {}
    if isinstance(model, Frozen) and not model.trained:
        known[id(model.network)] = model.network
    elif isinstance(model, Frozen):
        for tensor in (*model.network.parameters(), *model.network.buffers()):
            if not tensor.requires_grad:
                known[id(tensor)] = tensor
    # A module has a dozen dictionaries for hooks, nearly always empty. They take half of the time
    # of `deepcopy` unless it knows their copies.
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in (dict, OrderedDict) and not value:
                known[id(value)] = type(value)()
    return copy.deepcopy(model, known)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state with its frozen part, for files that stand alone."""
    frozen = model.frozen_state() if isinstance(model, Frozen) else {}
    return {**frozen, **model.state_dict()}


def _leave_out_frozen(model: Frozen, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in model.frozen_state():
        del state[f"{prefix}{name}"]


def _fill_in_frozen(model: Frozen, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, value in model.frozen_state().items():
        state.setdefault(f"{prefix}{name}", value)


def _scaled(images: Tensor, side: int, mode: str) -> Tensor:
    if mode == "nearest":
        return functional.interpolate(images, (side, side), mode=mode)
    shrinks = max(images.shape[2:]) > side
    return functional.interpolate(
        images, (side, side), mode=mode, align_corners=False, antialias=shrinks
    )


def side_for(spec: DataSpec, largest: int) -> int:
    """Side of the network's images: the run's, in steps of 32, from 128 to `largest`."""
    return min(max(STRIDE * round(max(spec.shape[1:]) / STRIDE), MIN_SIDE), largest)


def _last_part(network: nn.Module) -> str:
    """Name of the last part with matrices, within those with nearly all; empty if there is none.

    Normalisation after it has none. Nearly all are in the list of a transformer's blocks.
    """
    path, part, whole = "", network, _matrices(network)
    while parts := [(name, inner) for name, inner in part.named_children() if _matrices(inner)]:
        name, part = parts[-1]
        path = f"{path}.{name}".removeprefix(".")
        if _matrices(part) < NEARLY_ALL * whole:
            break
    return path


def _matrices(module: nn.Module) -> int:
    """Numbers in the weights of a module's dense and convolutional layers."""
    return sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)


def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)
