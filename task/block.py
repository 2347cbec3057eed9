"""The base of all tables of settings, and what its errors say: which keys are wrong, and how."""

import difflib
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from flwr_distill.task.errors import MAX_SHOWN, SettingsError

MAX_PROBLEMS = 100
"""Bad keys that an error names; a hostile node may send thousands."""


def _hyphenated(name: str) -> str:
    return name.replace("_", "-")


class Block(BaseModel):
    """A table of the run config: frozen, strict about types, rejects unknown keys.

    The string below a field is its description, which settings pages and ``flwr-distill settings``
    show.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=_hyphenated,
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def checked(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate values by hyphenated key; SettingsError names `source` and the bad keys."""
        try:
            return cls.model_validate(dict(values), by_alias=True, by_name=False)
        except ValidationError as error:
            known, details = _dotted_keys(cls), error.errors()[:MAX_PROBLEMS]
            raise _joined([e for item in details for e in _errors(item, known)], source) from None


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            keys += _dotted_keys(table, f"{key}.")
        else:
            keys.append(key)
    return keys


def _keys_below(key: str, value: Any) -> list[str]:
    """The dotted keys of a table; the key itself if it is none."""
    if not isinstance(value, Mapping):
        return [key]
    return [below for name, inner in value.items() for below in _keys_below(f"{key}.{name}", inner)]


def _unknown(key: str, known: list[str]) -> SettingsError:
    """Name the key that ends or begins like an unknown one, else the nearest."""
    near = [name for name in known if name.endswith(f".{key}")]
    near += [name for name in known if name.startswith(key)]
    near += difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see flwr-distill settings"
    table, dot, _ = key.partition(".")
    if dot and not any(name.startswith(f"{table}.") for name in known):
        remedy += f"; no method with settings {table}.* is installed here"
    return SettingsError("is not a known key", where=key, remedy=remedy)


def _errors(details: Any, known: list[str]) -> list[SettingsError]:
    """Errors of one of pydantic's: several if a whole table is unknown."""
    key = _hyphenated(".".join(str(part) for part in details["loc"]))
    if details["type"] == "extra_forbidden":
        return [_unknown(key, known) for key in _keys_below(key, details["input"])]
    if details["type"] == "missing":
        return [SettingsError("is missing", where=key)]
    problem = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = details["input"]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str | bytes | list):
        value = value[:MAX_SHOWN]
    return [SettingsError(problem, where=key, value=value)]


def _joined(errors: list[SettingsError], source: str) -> SettingsError:
    if len(errors) > 1:
        return SettingsError("; ".join(str(error) for error in errors), source=source)
    errors[0].source = source
    return errors[0]
