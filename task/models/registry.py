"""Models by name: seeded construction, and a check that they fit the data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from flwr_distill.task.backbone_settings import BackboneSettings
from flwr_distill.task.backbones.frozen import STRIDE, Frozen
from flwr_distill.task.backbones.pretrained import PACKAGES, pretrained
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError as ModelError  # passed on
from flwr_distill.task.models.checks import check_model, initialise_lazy_layers
from flwr_distill.task.plugin import (
    PluginError,
    call_plugin,
    import_object,
    located,
    path_of,
    plugged_in,
)
from flwr_distill.task.settings import TaskSettings

ModelFactory = Callable[[DataSpec], nn.Module]
Fits = Callable[[DataSpec], bool]

AS_NAMED = BackboneSettings()

_MODELS: dict[str, tuple[ModelFactory, Fits]] = {}


def register(name: str, fits: Fits) -> Callable[[ModelFactory], ModelFactory]:
    """Register the decorated factory as model ``name``, for datasets that it ``fits``."""

    def add(factory: ModelFactory) -> ModelFactory:
        _MODELS[name] = (factory, fits)
        return factory

    return add


def model_names(spec: DataSpec | None = None) -> list[str]:
    """Names of all models, or of those that fit ``spec``."""
    return [name for name, (_, fits) in _MODELS.items() if spec is None or fits(spec)]


def create_model(
    name: str,
    spec: DataSpec,
    seed: int | None = None,
    backbone: BackboneSettings = AS_NAMED,
) -> nn.Module:
    """Build a model for a dataset: (n, C, H, W) to logits (n, num_classes), on the CPU.

    Parameters
    ----------
    name : str
        A registered name (see `model_names`); ``auto`` (see `architecture`); or
        ``"my_pkg.mod:Cls"``, called as ``Cls(spec)``.
    seed : int, optional (default: None)
        Seed of the initial weights. None draws from torch's global generator, which a seed leaves
        unchanged.
    backbone : BackboneSettings (default: that of the model, with its head to train)
        Network in place of the model's, weights and trained part; for frozen ones alone.

    Raises
    ------
    ModelError
        If the model is unknown or does not fit ``spec``.
    """
    if backbone.network:
        if name != "auto":
            raise _refused(name, "stands beside backbone.network", 'leave it at "auto"')
        model = _create(name, lambda spec: pretrained(backbone, spec), spec, seed)
    elif name.partition(":")[0] in PACKAGES:
        raise _refused(name, "is a package's network", f'set backbone.network to "{name}" instead')
    else:
        name = architecture(name, spec)
        model = _create(name, _find_factory(name, spec), spec, seed)
    if backbone == AS_NAMED:
        return model
    if not isinstance(model, Frozen):
        raise _refused(
            name,
            "is no frozen network, and backbone.* are for those",
            "drop them, or set backbone.network",
        )
    with nullcontext() if seed is None else _seeded(seed):
        _adjust(model, backbone, spec)
    return model


def _adjust(model: Frozen, backbone: BackboneSettings, spec: DataSpec) -> None:
    if backbone.weights:
        model.load_network(Path(backbone.weights))
    if backbone.size and not backbone.network:
        _resize(model, backbone.size, spec)
    if backbone.fourier:
        model.widen(backbone.fourier)
    if backbone.trains == "lora":
        model.adapt(backbone.rank)
    else:
        model.thaw(backbone.trains)


def _resize(model: Frozen, side: int, spec: DataSpec) -> None:
    try:
        if side % STRIDE:
            raise ModelError(f"is no multiple of {STRIDE}")
        model.resize(side)
        _check(model, spec)
    except ModelError as error:
        remedy = "drop it, or use efficientnet-lite0"
        raise ModelError(error.problem, where="backbone.size", value=side, remedy=remedy) from error


def create_own_model(
    factory: Callable[[], object], spec: DataSpec, seed: int | None = None
) -> nn.Module:
    """Build a model by a function of someone's app, and check it; see `create_model`."""
    path = path_of(factory)
    return _create(path, lambda spec: call_plugin(factory, path, nn.Module), spec, seed)


def _create(name: str, factory: ModelFactory, spec: DataSpec, seed: int | None) -> nn.Module:
    with nullcontext() if seed is None else _seeded(seed):
        try:
            model = factory(spec)
            _check(model, spec)
        except (PluginError, ModelError) as error:
            if error.where in ("model", "backbone.network", "backbone.size"):
                raise
            raise _refused(name, error.problem, error.remedy) from error
    return model


def _check(model: nn.Module, spec: DataSpec) -> None:
    try:
        initialise_lazy_layers(model, spec)
        check_model(model, spec)
    except ModelError:
        raise
    except Exception as error:  # any of another package's code
        raise ModelError(
            f"cannot take images of {_dimensions(spec)} from {spec.name!r}: "
            + located(error, type(model).__module__),
            remedy=f"choose one of {', '.join(model_names(spec))}",
        ) from error


def _refused(name: str, problem: str, remedy: str) -> ModelError:
    return ModelError(problem, where="model", value=name, remedy=remedy)


def is_code(name: str) -> bool:
    """Whether a model's name says which code to import."""
    return ":" in name


def model_of(task: TaskSettings, spec: DataSpec, seed: int | None = None) -> nn.Module:
    """Build a run's model, with weights and trained part by ``backbone.*``; ModelError if it fails.

    Without a `seed` it has that of the run, by which all build the same frozen network.
    """
    seed = task.seed if seed is None else seed
    return create_model(task.model, spec, seed, task.backbone)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator, which layers draw from, within the block."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def architecture(name: str, spec: DataSpec) -> str:
    """The model that ``auto`` stands for with such data; any other name unchanged."""
    if name != "auto":
        return name
    if spec.kind != "image":
        return "bilstm" if spec.kind == "text" else "mlp"
    if max(spec.shape[1:]) <= 16:
        return "digits-cnn"
    return "hfldd-mnist" if spec.shape == (1, 28, 28) else "convnet3"


def _find_factory(name: str, spec: DataSpec) -> ModelFactory:
    if name in _MODELS:
        factory, fits = _MODELS[name]
        if not fits(spec):
            raise _refused(
                name,
                f"does not fit {spec.name!r} with images of {_dimensions(spec)}",
                f"choose one of {', '.join(model_names(spec))}",
            )
        return factory
    try:
        path = name if ":" in name else plugged_in("models", name)
        own = import_object(path) if path else None
    except PluginError as error:
        raise _refused(name, error.problem, error.remedy) from error
    if path is None:
        raise _refused(
            name,
            "is unknown here",
            f"choose auto, {', '.join(_MODELS)}, name your own as 'package.module:Class', or "
            "install its package",
        )
    return lambda spec: call_plugin(own, path, nn.Module, spec)


def _dimensions(spec: DataSpec) -> str:
    return "x".join(map(str, spec.shape))
