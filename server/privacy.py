"""Checks that differential privacy covers everything a method sends; nodes check it too."""

from protocol.method import Method
from server.settings import RunSettings
from task.settings import SettingsError


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
