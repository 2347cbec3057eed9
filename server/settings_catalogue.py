"""Every run-config key with its type, bounds, default and meaning, from the settings' classes.

As a script (``make settings``) it rewrites the run config in both ``pyproject.toml`` files and
``docs/settings.md``. With the names of an installed package and a file, it writes such a page.
"""

import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods, built_in_methods
from flwr_distill.server.settings import RunSettings, composed_settings
from flwr_distill.task.settings import RunConfigValue

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
APP = ROOT / "flwr_distill" / "app" / "pyproject.toml"
PAGE = ROOT / "docs" / "settings.md"

CORE = "core"
"""The name for keys outside of any table."""

_DECLARED = "tool.flwr.app.config"
_DECLARED_TABLES = re.compile(
    rf"^\[{re.escape(_DECLARED)}[].].*?(?=^\[(?!{re.escape(_DECLARED)}[].])|\Z)", re.M | re.S
)
_TYPES = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "array": "list",
    "object": "table",
    "null": "nothing",
}
_BOUNDS = {
    "minimum": "at least {:.15g}",
    "exclusiveMinimum": "above {:.15g}",
    "maximum": "at most {:.15g}",
    "exclusiveMaximum": "below {:.15g}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "matches `{}`",
}
_OF_SETTING = ("title", "default", "description")
"""Keywords of a schema that are fields of a `Setting`: key, default and meaning."""
_INTRODUCTION = """\
# Settings

<!-- Written by `make settings` from the settings' classes; do not edit. -->

Every setting of a run is a key of Flower's run config. What is not given has its default:

```console
flwr-distill run -c 'strategy="fedprox" train.proximal-mu=0.1'
flwr-distill run --preset hfldd-mnist
```

`flwr-distill settings` prints what stands here, with the settings of methods that other packages
bring, and `flwr-distill settings hfldd --preset mine.toml` writes a file for `-c`.
"""
_INTRODUCTION_OF_PACKAGE = """\
# Settings of {package}

<!-- Written by flwr_distill.server.settings_catalogue from the settings' classes; do not edit. -->
"""


@dataclass(frozen=True)
class Setting:
    """A run-config key."""

    key: str  # dotted, with hyphens
    default: Any  # as in JSON
    schema: Mapping[str, Any]  # JSON schema of its values
    meaning: str  # what it is, in Markdown: its field's description; empty if it has none

    @property
    def type(self) -> str:
        """In plain words."""
        kinds = [kind.get("type") for kind in self.schema.get("anyOf", [self.schema])]
        return " or ".join(_TYPES.get(kind, "any value") for kind in kinds)

    @property
    def bounds(self) -> str:
        """Allowed values, in Markdown; empty if all of the type are."""
        if choices := self.schema.get("enum"):
            return ", ".join(f"`{choice}`" for choice in choices)
        if self.schema.get("minLength") == 1:
            return "not empty"
        given = _BOUNDS.keys() & self.schema.keys()
        return ", ".join(_BOUNDS[key].format(self.schema[key]) for key in _BOUNDS if key in given)

    @property
    def values(self) -> str:
        """Type and bounds."""
        return f"{self.type}: {self.bounds}" if self.bounds else self.type


@dataclass(frozen=True)
class SettingsTable:
    """A table of the run config."""

    name: str  # as in the run config; `CORE` for the keys outside of any table
    meaning: str  # what it is, in Markdown
    methods: tuple[Method, ...]  # the methods that it belongs to; empty if to all
    settings: tuple[Setting, ...]  # its keys

    @property
    def prefix(self) -> str:
        """Of its keys."""
        return "" if self.name == CORE else f"{self.name}."

    @property
    def declared(self) -> bool:
        """Whether the app declares its keys; it does not declare those of installed packages."""
        return not self.methods or any(not method.package for method in self.methods)


def settings_tables(methods: Mapping[str, Method]) -> list[SettingsTable]:
    """All tables: the core keys, the tables that all runs have, and those of methods by name."""
    composed = composed_settings(methods)
    core = tuple(setting for setting in _settings(composed) if "." not in setting.key)
    tables = [SettingsTable(CORE, "What every run has besides the tables below.", (), core)]
    common = _tables(RunSettings)
    for name, table in sorted(_tables(composed).items(), key=lambda t: (t[0] not in common, t[0])):
        owners = [
            m for m in methods.values() if m.settings and m.table_name.replace("_", "-") == name
        ]
        meaning = _markdown((table.__doc__ or "").partition("\n\n")[0])
        settings = tuple(_settings(table, f"{name}."))
        tables.append(SettingsTable(name, meaning, tuple(owners), settings))
    return tables


def to_toml(tables: Iterable[SettingsTable], *, under: str = "", explained: bool = False) -> str:
    """Settings at their defaults as TOML, the core keys first.

    All are within the table `under`. If `explained`, comments give the meaning of each key.
    """
    parts = []
    for table in tables:
        header = f"{under}.{table.prefix}".strip(".")
        lines = [f"[{header}]"] if header else []
        for setting in table.settings:
            if explained:
                comment = f"{setting.meaning} ({setting.values})"
                lines += textwrap.wrap(
                    comment,
                    100,
                    initial_indent="# ",
                    subsequent_indent="# ",
                    break_on_hyphens=False,
                )
            key = setting.key.removeprefix(table.prefix)
            given = setting.default is not None  # TOML has no null
            lines.append(f"{'' if given else '# '}{key} = {json.dumps(setting.default)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_json(tables: Iterable[SettingsTable]) -> list[dict[str, Any]]:
    """All settings of tables, for programs: key, table, methods, type, default, bounds, meaning."""
    return [
        {
            "key": setting.key,
            "table": table.name,
            "methods": [method.name for method in table.methods],
            "type": setting.type,
            "default": setting.default,
            "bounds": setting.bounds,
            "schema": {k: v for k, v in setting.schema.items() if k not in _OF_SETTING},
            "meaning": setting.meaning,
        }
        for table in tables
        for setting in table.settings
    ]


def preset(tables: Iterable[SettingsTable], strategy: str = "") -> str:
    """A run config for ``flwr-distill run -c FILE``: settings at their defaults, explained.

    Without a `strategy`, settings of other packages are omitted, since nodes may be without these.
    """
    first = f"strategy = {json.dumps(strategy)}" if strategy else ""
    written = to_toml((t for t in tables if strategy or t.declared), explained=True)
    return "\n\n".join(filter(None, (first, written.strip()))) + "\n"


def with_plugins(pyproject: str, run_config: Mapping[str, RunConfigValue]) -> str:
    """An app's ``pyproject.toml`` with the tables of installed packages that a run config names.

    Others are omitted: a node without the package may refuse them.
    """
    named = {key.partition(".")[0] for key in run_config if "." in key}
    if not named:
        return pyproject
    tables = (t for t in settings_tables(all_methods()) if t.name in named and not t.declared)
    return "\n".join([pyproject, to_toml(_with_values(tables, run_config), under=_DECLARED)])


def declared_in(pyproject: str) -> str:
    """A ``pyproject.toml`` with current declarations of the settings."""
    tables = to_toml(settings_tables(built_in_methods()), under=_DECLARED)
    note = "# Written by `make settings`; docs/settings.md says what these are."
    header, _, rest = tables.partition("\n")
    written = f"{header}\n{note}\n{rest}"
    return _DECLARED_TABLES.sub(lambda _: written, pyproject, count=1)


def packaged(pyproject: str) -> str:
    """The packaged app's ``pyproject.toml``: the parts of a project's that Flower reads."""
    project = tomllib.loads(pyproject)["project"]
    keys = ("name", "version", "description", "license")
    lines = [f"{key} = {json.dumps(project[key])}" for key in keys]
    _, app, tables = pyproject.partition("[tool.flwr.app]\n")
    note = "# Written by `make settings` from the project's own pyproject.toml; do not edit."
    return "\n".join([note, "[project]", *lines, "", app + tables])


def page(package: str = "") -> str:
    """The text of ``docs/settings.md``, or of such a page for an installed package."""
    parts, methods = [_INTRODUCTION], built_in_methods()
    tables = settings_tables(methods)
    if package:
        installed = all_methods().items()
        methods = {name: m for name, m in installed if m.package.partition("==")[0] == package}
        tables = [table for table in settings_tables(methods) if table.methods]
        parts = [_INTRODUCTION_OF_PACKAGE.format(package=package)]
    for table in tables:
        parts.append(f"## {table.name}\n\n{table.meaning}\n")
        if table.methods:
            parts.append("".join(f"- `{m.name}`: {m.summary}\n" for m in table.methods))
        rows = [
            (f"`{s.key}`", s.type, f"`{json.dumps(s.default)}`", s.bounds, s.meaning)
            for s in table.settings
        ]
        parts.append(_markdown_table(("key", "type", "default", "allowed", "what it is"), rows))
    if rest := [m for m in methods.values() if not m.settings]:
        parts.append("## Methods without settings of their own\n")
        parts.append("".join(f"- `{m.name}`: {m.summary}\n" for m in rest))
    return "\n".join(parts)


def main() -> None:
    """Rewrite the files that depend on the settings, where they have changed."""
    declared = declared_in(PYPROJECT.read_text(encoding="utf-8"))
    texts = {PYPROJECT: declared, APP: packaged(declared), PAGE: page()}
    if len(sys.argv) > 1:
        package, name = sys.argv[1:]
        texts = {Path(name): page(package)}
    for file, text in texts.items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _settings(table: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    schemas = table.model_json_schema()["properties"]
    defaults = table().model_dump(mode="json", by_alias=True)
    inner = _tables(table)
    for name, field in table.model_fields.items():
        key = field.alias or name
        if key in inner:
            yield from _settings(inner[key], f"{prefix}{key}.")
        else:
            meaning = _markdown(field.description)
            yield Setting(prefix + key, defaults[key], schemas[key], meaning)


def _tables(table: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        field.alias or name: field.annotation
        for name, field in table.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _markdown(text: str | None) -> str:
    """A docstring's markup, such as ``:func:`name```, as Markdown in one line."""
    one_line = " ".join((text or "").split())
    return re.sub(r":\w+:`|``", "`", one_line)


def _markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = tuple(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def _with_values(
    tables: Iterable[SettingsTable], run_config: Mapping[str, RunConfigValue]
) -> Iterator[SettingsTable]:
    """The tables with a run's values for settings whose default, null, TOML cannot express."""
    for table in tables:
        settings = (
            replace(s, default=run_config.get(s.key)) if s.default is None else s
            for s in table.settings
        )
        yield replace(table, settings=tuple(settings))


if __name__ == "__main__":
    main()
