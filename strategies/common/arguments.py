"""Types of constructor arguments that a setting holds as JSON."""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flwr_distill.task.errors import SettingsError

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


def unknown_argument(cls: type, arguments: Iterable[str], settings: Iterable[str] = ()) -> str:
    """Say which argument a class's constructor does not know, with those that it does.

    Parameters
    ----------
    cls : type
        The class.
    arguments : Iterable[str]
        Names that a setting has.
    settings : Iterable[str] (default: ())
        Further names that the setting may have.

    Returns
    -------
    str
        Empty if it knows them all.
    """
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    known = set(settings)
    for constructor in _constructors(cls):
        _, *parameters = inspect.signature(constructor).parameters.values()  # without self
        known |= {parameter.name for parameter in parameters if parameter.kind in named}
    unknown = sorted(set(arguments) - known)
    if not unknown:
        return ""
    close = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no argument {unknown[0]!r} ({hint}There are {', '.join(sorted(known))})"


def _hints(cls: type) -> dict[str, Any]:
    """Types of a constructor's arguments by name."""
    hints: dict[str, Any] = {}
    for constructor in _constructors(cls):
        with suppress(NameError):  # annotations that only a type checker can resolve
            hints = {**get_type_hints(constructor), **hints}
    return hints


def _constructors(cls: type) -> Iterator[Callable[..., None]]:
    """Constructors that may get an argument: while they take ``**kwargs``, the next one's."""
    for base in cls.__mro__:
        if (constructor := vars(base).get("__init__")) is None or base is object:
            continue
        yield constructor
        parameters = inspect.signature(constructor).parameters.values()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
