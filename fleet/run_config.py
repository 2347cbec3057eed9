"""Reads overrides of a run config, as they are given on a command line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue
from flwr_distill.task.text_files import read_text

_PAIR = re.compile(r"""([^\s=]+)\s*=\s*("(?:[^"\\]|\\.)*"|'[^']*'|\S+)(?:\s+|$)""")


class RunConfigError(ReportedError, ValueError):
    """Overrides of a run config cannot be read."""


def read_run_config(text: str) -> dict[str, RunConfigValue]:
    """Read overrides by dotted key, as ``flwr run --run-config`` takes them.

    Parameters
    ----------
    text : str
        ``key=value key="text"``, with values as in TOML and perhaps spaces around ``=``; or the
        path of a TOML file.

    Raises
    ------
    RunConfigError
        If the file or a value cannot be read.
    """
    if text.endswith(".toml"):
        return _flat(_read(Path(text).expanduser()), text)
    overrides: dict[str, RunConfigValue] = {}
    rest = text.strip()
    while rest:
        if (pair := _PAIR.match(rest)) is None:
            raise RunConfigError(
                "is no override",
                where="run-config",
                value=_cut(rest),
                remedy='give key=value, with texts in quotes, as in num-rounds=5 strategy="fedavg"',
            )
        key, value = pair.groups()
        overrides |= _flat({key: _value(key, value)}, key)
        rest = rest[pair.end() :]
    return overrides


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise RunConfigError(
            f"cannot be read: {error}",
            where="run-config",
            value=str(file),
            remedy="give a TOML file",
        ) from error


def _value(key: str, text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        raise RunConfigError(
            "a text needs quotes",
            where=key,
            value=_cut(text),
            remedy=f'as in {key}="{_cut(text)}"',
        ) from None


def _flat(table: dict[str, object], where: str, prefix: str = "") -> dict[str, RunConfigValue]:
    overrides: dict[str, RunConfigValue] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            overrides |= _flat(value, where, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            overrides[prefix + name] = value
        else:
            raise RunConfigError(
                "Flower takes numbers, texts, true and false",
                where=prefix + name,
                value=value,
                remedy=f"in {where}",
            )
    return overrides


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
