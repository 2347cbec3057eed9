"""Reads constructor arguments that a setting holds as JSON."""

import json
from typing import Any

from task.settings import SettingsError


def read_arguments(text: str, setting: str) -> dict[str, Any]:
    """Read the JSON object of a setting such as ``strategy-args``; {} if it is empty.

    Raises
    ------
    SettingsError
        If it is not a JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise SettingsError(f"{setting} = {text!r}: not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise SettingsError(f'{setting} = {text!r}: must be a JSON object, {{"key": 1}}')
    return arguments
