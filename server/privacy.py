"""Whether differential privacy covers all that a method sends; nodes refuse it too if not."""

from protocol.method import Method
from server.settings import RunSettings
from task.settings import SettingsError


def check_privacy(settings: RunSettings, method: Method | None) -> None:
    """Refuse a run whose differential privacy would have a hole.

    Parameters
    ----------
    settings : RunSettings
        Of the run.
    method : Method, optional
        The strategy's, also where the strategy is named by its class. A strategy of no method has
        messages of its own that nodes do not handle, so plain training is all that it can ask.

    Raises
    ------
    SettingsError
        If ``train.dp-noise`` is set, and the method sends something that DP-SGD does not protect.
    """
    if not settings.train.dp_noise or method is None:
        return
    hole = ""
    if method.unprotected:
        hole = method.unprotected(settings.of_method(method), settings.train)
    elif method.phases or method.terms:
        hole = f"{method.name} does not declare what of it differential privacy covers"
    if hole:
        noise = f"train.dp-noise = {settings.train.dp_noise:g}"
        raise SettingsError(f"{noise}, strategy = {settings.strategy!r}: {hole}")
