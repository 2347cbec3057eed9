"""Checks that what protects nodes' samples fits the method; nodes check it too."""

from torch import nn

from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import why_not_private, why_private_step_fails


def check_privacy(settings: RunSettings, method: Method | None) -> None:
    """Refuse a run if ``train.dp-noise`` is set and the method sends unprotected data.

    `method` is None for classes of no method; nodes handle only plain training for them.

    Raises
    ------
    SettingsError
        If DP-SGD does not protect everything that the method sends.
    """
    if not settings.train.dp_noise or method is None:
        return
    hole = ""
    if method.unprotected:
        hole = method.unprotected(settings.of_method(method), settings.train)
    elif method.phases or method.terms:
        hole = f"{method.name} does not declare what differential privacy covers"
    if hole:
        noise = f"train.dp-noise = {settings.train.dp_noise:g}"
        raise SettingsError(f"{noise}, strategy = {settings.strategy!r}: {hole}")


def check_private_model(settings: RunSettings, model: nn.Module, spec: DataSpec) -> None:
    """Refuse a run with ``train.dp-noise`` if DP-SGD cannot train its model.

    Raises
    ------
    SettingsError
        Names the layer to blame.
    """
    if not settings.train.dp_noise:
        return
    if reason := why_not_private(model) or why_private_step_fails(model, spec):
        noise = f"train.dp-noise = {settings.train.dp_noise:g}"
        raise SettingsError(f"{noise}, model = {settings.model!r}: {reason}")


def check_secure_sums(settings: RunSettings, method: Method | None) -> None:
    """Refuse a run if ``secure-sums`` is set and its strategy needs single models.

    Where the method's own settings decide, its strategy does (`Method.summed`).

    A class of one's own may look at them, whatever class it is derived from.

    Raises
    ------
    SettingsError
        Names the setting that needs them.
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
    raise SettingsError(f"secure-sums = true: {reason}")
