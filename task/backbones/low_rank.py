"""Low-rank updates of frozen layers, LoRA, of which nodes' averages are exact."""

import copy
import math

import torch
from torch import Tensor, nn

from flwr_distill.task.errors import ModelError


class LowRank(nn.Module):
    """A frozen layer, and beside it the product of two thin ones: ``W x + B A x``.

    It is LoRA (Hu et al. 2022) with A as drawn (Sun et al. 2024, FFA-LoRA): only B trains, from 0.
    With one A for all nodes, the mean of their B times A is the mean of their products.

    The entries of A have variance 1 / rank, so that ``A^T A`` is the identity in the mean. The
    product then moves per step as W would, and the learning rate of training W suits B.

    Parameters
    ----------
    layer : nn.Linear or nn.Conv2d
        Of a convolution, A has its kernel and stride, and B is 1 x 1; without groups.
    rank : int
        Outputs of A, drawn from torch's global generator.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        outputs, *inputs = layer.weight.shape
        self.layer = layer
        # A copy, since layers of other packages pad inputs in their own way.
        self.down = copy.deepcopy(layer)
        self.down.weight = nn.Parameter(torch.randn(rank, *inputs) / math.sqrt(rank))
        self.down.bias = None
        self.up = (
            nn.Linear(rank, outputs, bias=False)
            if isinstance(layer, nn.Linear)
            else nn.Conv2d(rank, outputs, 1, bias=False)
        )
        nn.init.zeros_(self.up.weight)
        self.requires_grad_(False)
        self.up.requires_grad_(True)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's outputs with the update."""
        outputs: Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return outputs


def add_low_rank(network: nn.Module, rank: int, images: Tensor) -> None:
    """Put a `LowRank` in place of each dense and convolutional layer that is wider than `rank`.

    Layers with groups stay as they are, and those that a pass of `images` does not call: others
    read their weights, as nn.MultiheadAttention does, and torchvision's Swin.
    """
    layers = {name: layer for name, layer in network.named_modules() if _is_wider(layer, rank)}
    called: set[nn.Module] = set()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer))
        for layer in layers.values()
    ]
    with torch.no_grad():
        network(images)
    for hook in hooks:
        hook.remove()
    chosen = [name for name, layer in layers.items() if name and layer in called]
    if not chosen:
        raise ModelError(
            "the network has no dense or convolutional layer that is wider",
            where="backbone.rank",
            value=rank,
            remedy="lower it",
        )
    for name in chosen:
        network.set_submodule(name, LowRank(layers[name], rank))
    try:
        with torch.no_grad():
            network(images)
    except Exception as error:  # of any package's code
        raise ModelError(
            f"its layers take no low-rank updates: {' '.join(str(error).split())}",
            where="backbone.trains",
            value="lora",
            remedy='take "last-block" or "all"',
        ) from error


def _is_wider(layer: nn.Module, rank: int) -> bool:
    if not isinstance(layer, nn.Linear | nn.Conv2d) or getattr(layer, "groups", 1) != 1:
        return False
    outputs = layer.weight.shape[0]
    return min(outputs, layer.weight.numel() // outputs) > rank
