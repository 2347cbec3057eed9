"""Checks that what protects nodes' samples fits the method; nodes check it too."""

from torch import nn

from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import why_not_private, why_private_step_fails


def check_privacy(settings: RunSettings, method: Method | None) -> None:
    """Raise SettingsError if ``train.dp-noise`` is set and the method sends unprotected data.

    Or if the method has an epsilon of its own, which would protect virtual images alone. `method`
    is None for classes of no method; nodes handle only plain training for them.
    """
    own_epsilon = getattr(settings.of_method(method), "dp_epsilon", 0.0)
    if method and own_epsilon and settings.train.on == "virtual":
        name = f"{method.table_name}.dp-epsilon"
        raise SettingsError(
            f"{name} = {own_epsilon:g} would protect virtual images, not the samples behind them",
            where="train.on",
            value=settings.train.on,
            remedy=f"set it to real, or {name} to 0",
        )
    if not settings.train.dp_noise or method is None:
        return
    hole = ""
    if method.unprotected:
        hole = method.unprotected(settings.of_method(method), settings.train)
    elif method.phases or method.terms:
        hole = f"{method.name} does not declare what differential privacy covers"
    if hole:
        problem = f"does not fit strategy = {settings.strategy!r}: {hole}"
        raise SettingsError(problem, where="train.dp-noise", value=settings.train.dp_noise)


def check_private_model(settings: RunSettings, model: nn.Module, spec: DataSpec) -> None:
    """Raise SettingsError, with the layer, if DP-SGD is on and cannot train the run's model."""
    if not settings.train.dp_noise:
        return
    if reason := why_not_private(model) or why_private_step_fails(model, spec):
        problem = f"does not fit model = {settings.model!r}: {reason}"
        raise SettingsError(problem, where="train.dp-noise", value=settings.train.dp_noise)


def check_secure_sums(settings: RunSettings, method: Method | None) -> None:
    """Raise SettingsError if ``secure-sums`` is set and another setting needs single models.

    Where the method's own settings decide, its strategy does (`Method.summed`).

    A class of one's own may look at them, whatever class it is derived from.
    """
    if not settings.secure_sums:
        return
    if method is None or settings.strategy != method.name or not method.summed:
        known = ", ".join(sorted(name for name, other in all_methods().items() if other.summed))
        reason = f"strategy = {settings.strategy!r} may need single models (take one of {known})"
    elif settings.aggregator:
        reason = f"aggregator = {settings.aggregator!r} needs single models (leave it empty)"
    elif settings.start:
        reason = f"start = {settings.start!r} gets sums of single nodes (leave it empty)"
    elif settings.defence == "on":
        reason = 'defence = "on" needs single models (set it to off)'
    else:
        return
    raise SettingsError(reason, where="secure-sums", value=True)
