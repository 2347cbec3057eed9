"""The last dense layer of a model: strategies compare it, and its input is the features."""

from typing import cast

from torch import nn

from flwr_distill.task.errors import ModelError


def last_dense(model: nn.Module, name: str = "") -> str:
    """Name of a model's last dense layer, as in ``model.get_submodule(name)``; checks a given name.

    By default the ``nn.Linear`` registered last, which models built in order also call last.
    """
    dense = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not dense:
        raise ModelError("has no dense layer (torch.nn.Linear)", where=type(model).__name__)
    if name and name not in dense:
        raise ModelError(
            f"{name!r} is not a dense layer of {type(model).__name__}; it has {', '.join(dense)}"
        )
    return name or dense[-1]


def last_dense_layer(model: nn.Module, name: str = "") -> nn.Linear:
    """A model's last dense layer itself; see `last_dense`."""
    return cast(nn.Linear, model.get_submodule(last_dense(model, name)))
