"""A model's features: the input of its last dense layer."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flwr_distill.task.models import last_dense


class Features:
    """Records the input of a model's last dense layer in each forward pass.

    Parameters
    ----------
    model : nn.Module
        Any model with a dense layer; it keeps a forward hook.
    layer : str (default: "")
        Name of the layer; see :func:`task.models.last_dense`.

    Attributes
    ----------
    last : Tensor
        Features of the last minibatch, (n, d), part of its graph.
    """

    def __init__(self, model: nn.Module, layer: str = "") -> None:
        self.last: Tensor
        dense = model.get_submodule(last_dense(model, layer))
        dense.register_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.last = arguments[0]


def extractor(model: nn.Module, layer: str = "") -> Callable[[Tensor], Tensor]:
    """A copy of a model, in evaluation mode, as a function from images to features."""
    model = copy.deepcopy(model).eval()  # the hook must not stay in a model that is trained
    features = Features(model, layer)

    def extract(images: Tensor) -> Tensor:
        model(images)
        return features.last

    return extract
