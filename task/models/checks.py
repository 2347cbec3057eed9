"""Checks of a model before a run, which would fail later or learn something else.

A model is sent as NumPy arrays, averaged, exported, and used on single samples.
"""

import warnings
from copy import deepcopy
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from flwr_distill.task.compute.opacus_import import root_logger_unchanged
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError

SENT_TYPES = {
    *(torch.float16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
}
"""Types of numbers that messages, averages and model files have."""
TOLERANCE = 1e-3
"""How far from 1 the sum of probabilities may be."""
_NOT_PRIVATE = (
    "(use a model without batch normalisation and recurrent layers, such as convnet3, or "
    "train.dp-noise = 0)"
)


def initialise_lazy_layers(model: nn.Module, spec: DataSpec) -> None:
    """Give lazy layers their shapes and weights, drawn from torch's global generator.

    Raises ModelError if a forward pass does not reach one of them, or any error of the model.
    """
    if not _lazy(model):
        return
    _output(model, spec, 2)
    if unreached := _lazy(model):
        raise ModelError(
            f"{unreached[0]!r} is lazy, and no forward pass reaches its layer to give it a shape",
            remedy="remove the layer, or use one with a size, such as nn.Linear",
        )


def check_model(model: nn.Module, spec: DataSpec) -> None:
    """Check that a model maps any number of samples to logits, and can be sent and exported.

    Raises ModelError if not, which names the layer, or any error of the model.
    """
    _check_types(model)
    _check_statistics(model)
    output = _output(model, spec, 2)
    shape = tuple(getattr(output, "shape", ()))
    if shape != (2, spec.num_classes):
        raise ModelError(
            f"it returns an output of shape {shape} for a batch of 2, need (2, "
            f"{spec.num_classes}): one logit for each class of {spec.name!r}"
        )
    _check_logits(model, output)
    _check_single_sample(model, spec)


def why_not_private(model: nn.Module) -> str:
    """Which layer of a model DP-SGD cannot train, by its type, or nothing.

    DP-SGD needs a gradient of each sample. Leaves the model in training mode.
    """
    with root_logger_unchanged():  # here: importing Opacus takes a second
        from opacus.validators import ModuleValidator

    is_refused = bool(ModuleValidator.validate(model.train(), strict=False))
    layers = [
        f"layer {name!r}, a {type(module).__name__}, "
        for name, module in model.named_modules()
        if _keeps_statistics(module)
        or (
            is_refused
            and type(module) in ModuleValidator.VALIDATORS
            and ModuleValidator.validate(module, strict=False)
        )
    ]
    if not (is_refused or layers):
        return ""
    return f"{layers[0] if layers else 'it '}has no gradients of single samples {_NOT_PRIVATE}"


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer's buffers follow the samples; Opacus asks layers with weights alone."""
    instances = isinstance(module, _InstanceNorm) and module.track_running_stats
    return module.training and (isinstance(module, _BatchNorm) or instances)


def why_private_step_fails(model: nn.Module, spec: DataSpec) -> str:
    """Why a step of DP-SGD fails, tried on a copy of the model; empty if it does not."""
    with root_logger_unchanged():
        from opacus.grad_sample import GradSampleHooks

    tried = deepcopy(model).train()
    try:
        # Inputs have no gradients, of which Opacus warns; dropout draws from torch's generator.
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            if leak := _leak_past_clip(model, spec):
                return f"{leak} {_NOT_PRIVATE}"
            hooks = GradSampleHooks(tried)
            labels = torch.zeros(2, dtype=torch.int64)
            loss = functional.cross_entropy(tried(torch.zeros(2, *spec.shape)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            hooks.cleanup()
    except Exception as error:  # the model may be another package's
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return f"gradients of single samples fail: {reason} {_NOT_PRIVATE}"
    for name, weight in tried.named_parameters():
        if weight.requires_grad and weight.grad is None:
            return f"{name!r} takes no part in training (remove it, or set requires_grad to False)"
    return ""


def _leak_past_clip(model: nn.Module, spec: DataSpec) -> str:
    """How samples reach a trained model past the clip of their gradients; empty if they do not."""
    draws = torch.Generator().manual_seed(0)
    buffers = []
    for _ in range(2):
        tried = deepcopy(model).train()
        inputs = torch.rand(2, *spec.shape, generator=draws).requires_grad_()
        with torch.random.fork_rng(devices=[]):
            logits = tried(inputs)
        buffers.append(dict(tried.named_buffers()))
    for name, first in buffers[0].items():
        if not torch.equal(first, buffers[1][name]):
            return f"its buffer {name!r} follows the samples, without clip and noise"
    shown = (logits[0] * torch.arange(1, spec.num_classes + 1)).sum()
    (gradient,) = torch.autograd.grad(shown, inputs, allow_unused=True)
    if gradient is not None and (gradient[1].abs() > 0).any():
        return "what it returns for a sample depends on the others of the minibatch"
    return ""


def _lazy(model: nn.Module) -> list[str]:
    """Names of parameters and buffers without a shape."""
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def _output(model: nn.Module, spec: DataSpec, num_samples: int) -> Tensor:
    """The output for zeros, in evaluation mode; afterwards the model is in training mode."""
    model.eval()
    with torch.no_grad():  # not inference mode: tensors that a model caches in it cannot train
        output: Tensor = model(torch.zeros(num_samples, *spec.shape))
    model.train()
    return output


def _check_types(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in SENT_TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            remedy = (
                "store the real and the imaginary part as float32"
                if tensor.is_complex()
                else 'convert it to float32; train.precision="bf16" computes in bfloat16'
            )
            raise ModelError(
                f"{name!r} has type {kind}, which cannot be averaged and exported", remedy=remedy
            )


def _check_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"layer {name!r}, a {type(module).__name__}, has no running statistics, so that a "
                "prediction would depend on the other samples of its batch",
                remedy="set track_running_stats=True, or use nn.GroupNorm",
            )


def _check_logits(model: nn.Module, output: Tensor) -> None:
    """Refuse probabilities: the loss would apply softmax once more, and hardly learn."""
    sums = output.sum(1)
    if (output < 0).any() or not torch.allclose(sums, torch.ones_like(sums), atol=TOLERANCE):
        return
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Softmax)]
    where = f"layer {layers[-1]!r}" if layers else f"{type(model).__name__}.forward"
    raise ModelError(
        "its outputs are probabilities (none is negative, they sum to 1), need logits: training "
        "and predictions apply softmax themselves",
        remedy=f"remove the softmax in {where}",
    )


def _check_single_sample(model: nn.Module, spec: DataSpec) -> None:
    """Check that the output for one sample keeps its batch dimension: ``squeeze()`` drops it."""
    dimensions: dict[int, list[tuple[str, int]]] = {2: [], 1: []}  # of each layer's input
    reason = ""
    for num_samples, seen in dimensions.items():
        hooks = [
            module.register_forward_pre_hook(partial(_note_input, seen, name))
            for name, module in model.named_modules()
            if name
        ]
        try:
            shape = tuple(_output(model, spec, num_samples).shape)
        except Exception as error:  # the model may be another package's
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        for hook in hooks:
            hook.remove()
    if not reason and shape == (1, spec.num_classes):
        return
    for (name, usual), (_, single) in zip(dimensions[2], dimensions[1], strict=False):
        if single != usual:
            reason = f"layer {name!r} gets an input with {single} dimensions instead of {usual}"
            break
    raise ModelError(
        "it takes a batch of 2 samples, and not of 1, as in predictions: "
        f"{reason or f'its output has shape {shape}'}",
        remedy="in place of squeeze() use flatten(1), or name the dimension: squeeze(-1)",
    )


def _note_input(
    seen: list[tuple[str, int]], name: str, module: nn.Module, inputs: tuple[object, ...]
) -> None:
    if inputs and isinstance(inputs[0], Tensor):
        seen.append((name, inputs[0].ndim))
