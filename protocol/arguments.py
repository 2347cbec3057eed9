"""Settings of a method that a run gives as JSON, ``strategy-args``."""

import json
from collections.abc import Mapping
from typing import Any

from flwr_distill.protocol.method import Method
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import Block


def read_arguments(text: str, setting: str) -> dict[str, Any]:
    """Read the JSON object of a setting such as ``strategy-args``; {} if it is empty."""
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise SettingsError("not JSON", where=setting, value=text, remedy=str(error)) from error
    if not isinstance(arguments, dict):
        raise SettingsError('must be a JSON object, {"key": 1}', where=setting, value=text)
    return arguments


def method_settings(method: Method, table: Mapping[str, Any], strategy_args: str) -> Block | None:
    """Settings of a method: its table, overridden by ``strategy-args``; None if it has none."""
    if method.settings is None:
        return None
    values = {**method.settings().model_dump(by_alias=True), **table}
    for name, value in read_arguments(strategy_args, "strategy-args").items():
        if (key := name.replace("_", "-")) in values:
            values[key] = value
    return method.settings.checked(values, "strategy-args")
