"""`flwr-distill settings`: every setting of a run, printed or written to a file."""

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_distill.cli.errors import fail

if TYPE_CHECKING:
    from flwr_distill.protocol.method import Method
    from flwr_distill.server.settings_catalogue import SettingsTable


def settings(
    name: Annotated[str, typer.Argument(show_default="all")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    preset: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="New .toml file to write them to.", show_default="none"),
    ] = None,
) -> None:
    """Print every setting of a run: its default, its possible values, and its meaning.

    NAME is a table (core, partition, train, hfldd ...) or a method, which may share a table.

    --preset writes them to a file with their defaults, explained in comments. Change some, and
    start a run with `flwr-distill run -c FILE`.
    """
    from flwr_distill.protocol.registry import all_methods
    from flwr_distill.server import settings_catalogue
    from flwr_distill.task.errors import SettingsError

    methods = all_methods()
    try:
        tables = settings_catalogue.settings_tables(methods)
    except SettingsError as error:
        fail(error)
    strategy = name if name in methods else ""
    if name:
        known = dict.fromkeys([*(table.name for table in tables), *methods])
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            fail(f"not a table or method: {', '.join(known)}", where=name, remedy=hint)
        tables = [
            table
            for table in tables
            if name in (table.name, *(method.name for method in table.methods))
        ] or _settings_of_terms(methods[name], tables)
        strategy = strategy or next((method.name for method in tables[0].methods), "")

    if preset:
        _write(preset, settings_catalogue.preset(tables, strategy))
    elif as_json:
        typer.echo(json.dumps(settings_catalogue.as_json(tables), indent=2))
    else:
        _show(tables, strategy)


def _settings_of_terms(method: "Method", tables: list["SettingsTable"]) -> list["SettingsTable"]:
    """The settings of a method's loss terms, by table; for a method without its own table."""
    findings = []
    for table in tables:
        keys = {f"{table.prefix}{term}" for term in method.terms}
        if own := tuple(setting for setting in table.settings if setting.key in keys):
            findings.append(replace(table, settings=own))
    return findings


def _write(file: Path, text: str) -> None:
    if file.suffix != ".toml":
        fail(f"{file}: a run config must be a .toml file")
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        fail(error)
    typer.echo(f"flwr-distill run -c {file}")


def _show(tables: list["SettingsTable"], strategy: str) -> None:
    console = Console(highlight=False)
    for table in tables:
        console.print(_in_terminal(table))
    if not tables:
        console.print(
            f"{strategy} has no settings of its own. Arguments of its constructor go into "
            "strategy-args; flwr-distill settings prints the settings of every run."
        )
    example = next((s for table in tables for s in table.settings), None)
    if example:
        given = f"{example.key}={json.dumps(example.default)}"
        chosen = f'strategy="{strategy}" ' if strategy else ""
        console.print(f"Set them: flwr-distill run -c '{chosen}{given}'")
        console.print("Write them to a file: --preset FILE.toml")


def _in_terminal(table: "SettingsTable") -> Table:
    title: list[str | tuple[str, str]] = [(table.name, "bold"), "  ", table.meaning]
    if len(table.methods) > 1:
        title.append(f" For {', '.join(method.name for method in table.methods)}.")
    shown = Table(
        title=Text.assemble(*title), title_justify="left", title_style="", box=box.SIMPLE_HEAD
    )
    shown.add_column("key", no_wrap=True)
    shown.add_column("default")
    shown.add_column("meaning")
    for setting in table.settings:
        meaning = Text.assemble(setting.meaning, (f" ({setting.values})", "dim"))
        shown.add_row(Text(setting.key), Text(json.dumps(setting.default)), meaning)
    return shown
