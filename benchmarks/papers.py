"""Tables of the papers beside ours: paper's value, ours, and what differs in the setting.

``python -m benchmarks.papers --list [--data-root DIR]``

All tables, with what is missing on this machine: data, or a GPU.

``python -m benchmarks.papers TABLE [--quick] [--data-root DIR] [--out DIR] [--json FILE]``

A run for each cell, in this process, with the real apps: a preset, and what the cell changes of it.
Values are accuracies in percent after the last round: of the global model on the server's test
samples, or the nodes' unweighted mean where each node brings its own. ``--quick`` is a smaller
setting, of fewer rounds; each difference is printed. Runs are kept in ``--out``: those that are
over are not run again, one that was interrupted goes on after its last round.

The tables are data, in ``benchmarks/paper_tables``. A value of a paper stands there with its
source, or not at all.
"""

import argparse
import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as Printed

from benchmarks.in_process import Node, Settings, run_in_process
from server.record.checkpoint import checkpoints
from task.datasets import DatasetError, load_dataset

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "benchmarks" / "paper_tables"
OUT = Path("runs") / "papers"
DOMAINS = "private"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(_Data):
    """A number of a paper, in percent, and where it was read."""

    value: float
    source: str


class Row(_Data):
    """A row of a table: a preset, changes to it, and the paper's values by method."""

    name: str
    preset: str
    settings: dict[str, bool | int | float | str] = {}
    paper: dict[str, Value] = {}


class Table(_Data):
    """A table of a paper.

    Parameters
    ----------
    name, title : str
        For the command line; what is measured.
    missing : str (default: "")
        Why it cannot be run anywhere: data that this project cannot read.
    gpu : str (default: "")
        What makes the whole setting too much for a CPU.
    differs : str (default: "")
        What differs from the paper and no setting tells.
    data : tuple[str, ...] (default: ())
        Data sets whose files it needs.
    samples : int (default: 0)
        Training samples of the paper's data set; 0 where it has several.
    nodes : tuple[str, ...] (default: ())
        Data set of each node, where they have their own.
    shared : bool (default: False)
        Whether each of these nodes has only a part of its data set, another one than the others.
    methods : dict[str, Settings]
        What a method changes of the preset.
    quick : Settings
        What ``--quick`` changes of it.
    rows : tuple[Row, ...]
        Each is run with each method.
    """

    name: str
    title: str
    missing: str = ""
    gpu: str = ""
    differs: str = ""
    data: tuple[str, ...] = ()
    samples: int = 0
    nodes: tuple[str, ...] = ()
    shared: bool = False
    methods: dict[str, dict[str, bool | int | float | str]] = {}
    quick: dict[str, bool | int | float | str] = {}
    rows: tuple[Row, ...] = ()

    def cells(self, *, quick: bool) -> "Iterator[Cell]":
        """A cell for each row and method."""
        for row in self.rows:
            preset = flatten_dict(tomllib.loads(_preset(row.preset).read_text()))
            for method, changes in self.methods.items():
                paper = {**preset, **row.settings, **changes}
                ours = {**paper, **(self.quick if quick else {})}
                yield Cell(row.name, method, row.paper.get(method), paper, ours)

    def node_configs(self, cell: "Cell") -> list[Settings]:
        """Node config of each node of a cell; on its GPU, if the machine has one."""
        if not self.nodes:
            number = int(cell.ours["min-nodes"])
            return [{"num-partitions": number, "device": "auto"}] * number
        part = {"num-partitions": len(self.nodes)} if self.shared else {}
        return [{"dataset": name, "device": "auto", **part} for name in self.nodes]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the paper's settings as far as the data allow, and those that are run."""

    row: str
    method: str
    paper: Value | None
    full: Settings
    ours: Settings

    @property
    def rounds(self) -> int:
        """Rounds of our run."""
        return int(self.ours["num-rounds"])

    def folder(self, out: Path) -> Path:
        """Folder of its run, another one for other settings."""
        digest = hashlib.sha256(json.dumps(self.ours, sort_keys=True).encode()).hexdigest()[:8]
        words = f"{self.row} {self.method} {digest}".lower()
        return out / "".join(c if c.isalnum() or c in ".+" else "-" for c in words)

    def differences(self, samples: tuple[int, int] | None) -> str:
        """What our run has otherwise than the paper; `samples` are ours and the paper's."""
        texts = [
            f"{key} {value}, not {self.full.get(key, 'the default')}"
            for key, value in self.ours.items()
            if value != self.full.get(key)
        ]
        if samples and samples[0] != samples[1]:
            texts.append(f"{samples[0]:,} training samples, not {samples[1]:,}")
        return "; ".join(texts)


def read_tables() -> dict[str, Table]:
    """All tables by name; what stands above the tables of a file holds for those without it."""
    tables = {}
    for file in sorted(TABLES.glob("*.toml")):
        common = tomllib.loads(file.read_text())
        for own in common.pop("tables"):
            table = Table.model_validate({**common, **own})
            tables[table.name] = table
    return tables


def _preset(name: str) -> Path:
    return ROOT / "presets" / f"{name}.toml"


def lacks(table: Table, data_root: str) -> str:
    """What this machine lacks for a table; empty if nothing."""
    if table.missing:
        return table.missing
    absent = []
    for name in table.data:
        try:
            load_dataset(name, data_root or None)
        except DatasetError:
            absent.append(name)
    return f"data not found: {', '.join(absent)}" if absent else ""


def run_cell(table: Table, cell: Cell, out: Path, data_root: str, progress: Progress) -> float:
    """Run what is left of a cell; return its accuracy in percent."""
    folder = cell.folder(out)
    metrics = folder / "1" / "metrics.jsonl"

    def rounds_done() -> int:
        return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0

    bar = progress.add_task(f"{cell.row}, {cell.method}", total=cell.rounds)

    def watched(place: int, node: Node) -> Node:
        def answer(message: Any) -> Any:
            progress.update(bar, completed=rounds_done())
            return node(message)

        return answer

    if rounds_done() < cell.rounds:
        config = {
            **cell.ours,
            "data-root": data_root,
            "resume": "latest" if checkpoints(folder / "1") else "",
        }
        folder.mkdir(parents=True, exist_ok=True)
        run_in_process(config, table.node_configs(cell), folder, watched)
    progress.remove_task(bar)
    last = json.loads(metrics.read_text().splitlines()[-1])
    own = cell.ours["dataset"] == DOMAINS or last["accuracy"] is None
    return 100 * float(last["node_accuracy" if own else "accuracy"])


def _samples(table: Table, cell: Cell, data_root: str) -> tuple[int, int] | None:
    """Training samples of our data set and of the paper's."""
    if not table.samples:
        return None
    return len(load_dataset(str(cell.ours["dataset"]), data_root or None).train), table.samples


def run_table(
    table: Table, *, quick: bool, data_root: str, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Run what is left of a table's cells; return a row for each, and print it."""
    out = out / table.name
    lines = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        cells = list(table.cells(quick=quick))
        whole = progress.add_task("rounds of the table", total=sum(cell.rounds for cell in cells))
        for cell in cells:
            ours = run_cell(table, cell, out, data_root, progress)
            progress.advance(whole, cell.rounds)
            lines.append(
                {
                    "row": cell.row,
                    "method": cell.method,
                    "paper": cell.paper and cell.paper.value,
                    "source": cell.paper and cell.paper.source,
                    "ours": round(ours, 2),
                    "difference": cell.differences(_samples(table, cell, data_root)),
                }
            )
            progress.console.print(f"{cell.row}, {cell.method}: {ours:.1f} %")
    return lines


def print_table(table: Table, lines: list[dict[str, Any]], console: Console) -> None:
    """Print the cells, and what differs in all of them."""
    printed = Printed("row", "method", "paper", "ours", "difference", title=table.title)
    for line in lines:
        paper = "-" if line["paper"] is None else f"{line['paper']:.1f}"
        printed.add_row(
            line["row"], line["method"], paper, f"{line['ours']:.1f}", line["difference"]
        )
    console.print(printed)
    for source in dict.fromkeys(line["source"] for line in lines if line["source"]):
        console.print(f"paper: {source}", markup=False)
    if table.differs:
        console.print(f"all cells: {table.differs}", markup=False)


def print_list(tables: dict[str, Table], data_root: str, console: Console) -> None:
    """Print all tables, their commands and what is missing."""
    printed = Printed("TABLE", "what", "cells", "missing here", "needs a GPU, but for --quick")
    for table in tables.values():
        cells = str(len(table.rows) * len(table.methods))
        printed.add_row(
            table.name, table.title, cells, lacks(table, data_root) or "nothing", table.gpu
        )
    console.print(printed)
    console.print("python -m benchmarks.papers TABLE [--quick] [--data-root DIR]", markup=False)


def main() -> None:
    """List the tables, or run one and print it."""
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=tables, metavar="TABLE", help="see --list")
    parser.add_argument("--list", action="store_true", help="all tables, and what is missing here")
    parser.add_argument("--quick", action="store_true", help="a smaller setting")
    parser.add_argument("--data-root", default="", help="folder of the data sets")
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="keep the runs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    arguments = parser.parse_args()
    console = Console()
    if arguments.list:
        print_list(tables, arguments.data_root, console)
        return
    if arguments.table is None:
        parser.error("name a table, or --list")
    table = tables[arguments.table]
    if missing := lacks(table, arguments.data_root):
        parser.error(f"{table.name}: {missing} (set --data-root to their folder)")
    lines = run_table(
        table,
        quick=arguments.quick,
        data_root=arguments.data_root,
        out=arguments.out,
        console=console,
    )
    print_table(table, lines, console)
    if arguments.json is not None:
        content = {"table": table.name, "quick": arguments.quick, "cells": lines}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
