"""Types of constructor arguments that a setting holds as JSON."""

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from task.settings import SettingsError

_LENIENT = ConfigDict(arbitrary_types_allowed=True)


def check_types(cls: type, arguments: Mapping[str, Any], setting: str) -> None:
    """Check that arguments are of the types that a class's constructor names for them.

    A constructor that takes ``**kwargs`` hands on to the next class of its MRO. Names that none has
    are left to the constructor itself.

    Parameters
    ----------
    cls : type
        The class.
    arguments : Mapping[str, Any]
        Constructor arguments, as read from JSON.
    setting : str
        Where they come from, for errors: ``strategy-args``.

    Raises
    ------
    SettingsError
        If a value is of another type; names setting, argument and type.
    """
    hints = _hints(cls)
    for name, value in arguments.items():
        if name not in hints:
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config=_LENIENT)
        try:
            if isinstance(value, list):  # may stand for a tuple
                adapter.validate_json(json.dumps(value), strict=True)
            else:
                adapter.validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ")
            raise SettingsError(f"{setting}: {name} = {value!r}: {reason}") from None


def _hints(cls: type) -> dict[str, Any]:
    """Types of a constructor's arguments by name."""
    hints: dict[str, Any] = {}
    for base in cls.__mro__:
        if (constructor := vars(base).get("__init__")) is None or base is object:
            continue
        parameters = inspect.signature(constructor).parameters.values()
        with suppress(NameError):  # annotations that only a type checker can resolve
            hints = {**get_type_hints(constructor), **hints}
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
    return hints
