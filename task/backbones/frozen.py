"""A network that was trained on something else, with a linear head for the run's classes."""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.datasets.types import DataSpec


class Frozen(nn.Module):
    """A frozen network and a linear head on its features, which have norm 1.

    Only the head trains. The network stays in evaluation mode, and sees images with the channels,
    size and normalisation that it was trained with.

    Parameters
    ----------
    network : nn.Module
        Maps images (n, channels, size, size) to features (n, width), or (n, width, 1, 1).
    width : int
        Number of features.
    spec : DataSpec
        Of the run's images; grey ones are shown in all channels.
    size : int, optional (default: None)
        Side to which images are scaled; None leaves them as they are.
    mean, std : tuple of float, optional (default: None)
        By channel, of the pixels in [0, 1] that the network was trained on; None leaves them as the
        run normalises them.
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
    ) -> None:
        super().__init__()
        self.scale: Tensor
        self.shift: Tensor
        self.network = network.requires_grad_(False)
        self.head = nn.Linear(width, spec.num_classes)
        self._size = size
        mean, std = mean or spec.mean, std or spec.std
        self._channels = len(mean)
        # (p - m) / s of the run, to (p - mean) / std
        scale = _by_channel(spec.std) / _by_channel(std)
        shift = (_by_channel(spec.mean) - _by_channel(mean)) / _by_channel(std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.train()

    def train(self, mode: bool = True) -> "Frozen":
        """Set the mode of the head; the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, classes) of images as the run normalises them."""
        images = inputs.expand(-1, self._channels, -1, -1) * self.scale + self.shift
        if self._size is not None:
            side = (self._size, self._size)
            images = functional.interpolate(images, side, mode="bilinear", align_corners=False)
        features = self.network(images).flatten(1)
        logits: Tensor = self.head(functional.normalize(features))
        return logits


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all of a model's state that is not trained; empty if all its parameters are."""
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    if trained == {name for name, _ in model.named_parameters()}:
        return ""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name not in trained:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)
