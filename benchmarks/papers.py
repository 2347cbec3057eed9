"""Tables of the papers beside ours: paper's value, ours, and what differs in the setting.

``python -m benchmarks.papers --list [--data-root DIR]``

All tables, with what is missing on this machine: data, or a GPU.

``python -m benchmarks.papers TABLE [--row NAME] [--method NAME] [--quick] [--seconds S]
[--workers N] [--data-root DIR] [--out DIR] [--json FILE]``

A run for each cell, with the real apps in worker processes: a preset, and what the cell changes of
it. With ``--workers 1`` nodes run in this process, one by one; results are the same.
Values are accuracies in percent after the last round: of the global model on the server's test
samples, or the nodes' unweighted mean where each node brings its own. ``--quick`` is a smaller
setting, of fewer rounds; each difference is printed. Runs are kept in ``--out``: those that are
over are not run again, one that was interrupted continues after its last round, as does one that
``--seconds`` ended. On a GPU, nodes with the same message train in a batch. The JSON file has the
accuracy after each round, and the seconds of a core that nodes took by type of message, and all.

The tables are data, in ``benchmarks/paper_tables``. A value of a paper stands there with its
source, or not at all.
"""

import argparse
import hashlib
import json
import math
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
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

from benchmarks.in_process import Settings, only_errors, run_in_process
from flwr_distill.client.simulation import SIMULATED
from flwr_distill.flower.own_app import PRESETS
from flwr_distill.protocol.registry import all_methods, find_method
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.simulation.grid import Node
from flwr_distill.simulation.run import simulate, spread
from flwr_distill.task.datasets import DatasetError, load_dataset

TABLES = Path(__file__).with_name("paper_tables")
OUT = Path("runs") / "papers"
ALL = "all"
"""Key of the seconds of a whole run, with the server's."""


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
    settings: Settings = {}
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
    settings : Settings (default: {})
        What all cells change of their preset.
    methods : Mapping[str, Settings] (default: {})
        What a method changes of it.
    quick : Settings (default: {})
        What ``--quick`` changes of it.
    rows : tuple[Row, ...] (default: ())
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
    settings: Settings = {}
    methods: Mapping[str, Settings] = {}
    quick: Settings = {}
    rows: tuple[Row, ...] = ()

    def cells(self, *, quick: bool) -> "Iterator[Cell]":
        """A cell for each row and method."""
        changed = {**(self.quick if quick else {})}
        if self.nodes:
            changed["min-nodes"] = len(self.nodes)
        for row in self.rows:
            preset = flatten_dict(tomllib.loads((PRESETS / f"{row.preset}.toml").read_text()))
            for method, changes in self.methods.items():
                full = {**preset, **self.settings, **row.settings, **changes}
                yield Cell(row.name, method, row.paper.get(method), full, {**full, **changed})

    def node_configs(self, cell: "Cell") -> list[Settings]:
        """Node config of each node of a cell; on its GPU, if the machine has one."""
        if not self.nodes:
            number = int(cell.ours["min-nodes"])
            return [
                {"num-partitions": number, "device": spread("auto", place), SIMULATED: True}
                for place in range(number)
            ]
        part = {"num-partitions": len(self.nodes)} if self.shared else {}
        return [
            {"dataset": name, "device": spread("auto", place), **part}
            for place, name in enumerate(self.nodes)
        ]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the paper's value, its settings, and ours."""

    row: str
    method: str
    paper: Value | None
    full: Settings
    ours: Settings

    @property
    def rounds(self) -> int:
        """Rounds of our run."""
        return int(self.ours["num-rounds"])

    def folder(self, table: Path) -> Path:
        """Folder of its run within its table's; another one for other settings."""
        digest = hashlib.sha256(json.dumps(self.ours, sort_keys=True).encode()).hexdigest()[:8]
        words = f"{self.row} {self.method} {digest}".lower()
        return table / "".join(c if c.isalnum() or c in ".+" else "-" for c in words)


def read_tables() -> dict[str, Table]:
    """All tables by name; what stands above the tables of a file holds for those without it."""
    tables = {}
    for file in sorted(TABLES.glob("*.toml")):
        common = tomllib.loads(file.read_text())
        for own in common.pop("tables"):
            table = Table.model_validate({**common, **own})
            tables[table.name] = table
    return tables


def missing_for(table: Table, data_root: str) -> str:
    """What a table needs and this machine does not have; empty if nothing."""
    if table.missing:
        return table.missing
    absent = []
    for name in table.data:
        try:
            load_dataset(name, data_root or None)
        except DatasetError:
            absent.append(name)
    return f"no files of {', '.join(absent)} in --data-root" if absent else ""


def rounds_done(folder: Path) -> int:
    """Finished rounds of the run in a cell's folder."""
    metrics = folder / "1" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def run_cell(
    table: Table,
    cell: Cell,
    folder: Path,
    data_root: str,
    show: Callable[[], None],
    workers: int | None,
) -> None:
    """Run a cell, or continue it after its last round; calls `show` at each message to a node."""
    spent = defaultdict(float, seconds(folder))

    def book(message: Message, taken: float) -> None:
        show()
        for purpose in (message.metadata.message_type, ALL):
            spent[purpose] += taken

    def watched(place: int, node: Node) -> Node:
        def answer(message: Message) -> RecordDict | None:
            show()
            with booked(spent, message.metadata.message_type):
                return node(message)

        return answer

    resume = "latest" if checkpoints(folder / "1") else ""
    config = {**cell.ours, "data-root": data_root, "resume": resume}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with booked(spent, ALL), only_errors():
            if workers == 1:
                run_in_process(config, table.node_configs(cell), folder, watched)
            else:
                simulate(
                    config,
                    table.node_configs(cell),
                    folder,
                    workers=workers,
                    run_id=1,
                    on_answer=book,
                )
    finally:
        (folder / "seconds.json").write_text(json.dumps(spent))


@contextmanager
def booked(spent: dict[str, float], purpose: str) -> Iterator[None]:
    """Add the seconds of a core that the block takes."""
    start = time.process_time()
    try:
        yield
    finally:
        spent[purpose] += time.process_time() - start


def seconds(folder: Path) -> dict[str, float]:
    """Seconds of a core that a cell took so far, by type of message, and of all."""
    file = folder / "seconds.json"
    spent: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return spent


def accuracies(folder: Path) -> list[float | None]:
    """Accuracy by round, from 0 on, in percent; the nodes' mean where there is no other."""
    lines = (folder / "1" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    shares = [row["node_accuracy" if row["accuracy"] is None else "accuracy"] for row in rows]
    return [None if share is None else round(100 * share, 2) for share in shares]


class OutOfTime(BaseException):
    """The time for a table is over; not an error that a server would take for a node's."""


def run_table(
    table: Table,
    cells: list[Cell],
    *,
    data_root: str,
    out: Path,
    console: Console,
    seconds_at_most: float,
    workers: int | None,
) -> list[dict[str, Any]]:
    """Run what is left of a table's cells until time is up or Ctrl-C; a line for each that ran."""
    deadline = time.monotonic() + seconds_at_most
    folders = [cell.folder(out / table.name) for cell in cells]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    lines = []
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        all_rounds, done = sum(cell.rounds for cell in cells), sum(map(rounds_done, folders))
        bar = progress.add_task("rounds", total=all_rounds, completed=done)

        def show() -> None:
            progress.update(bar, completed=sum(map(rounds_done, folders)))
            if time.monotonic() > deadline:
                raise OutOfTime

        for cell, folder in zip(cells, folders, strict=True):
            if rounds_done(folder) < cell.rounds:
                progress.update(bar, description=f"rounds; {cell.row}, {cell.method}")
                try:
                    run_cell(table, cell, folder, data_root, show, workers)
                except OutOfTime:
                    pass
                except KeyboardInterrupt:  # what ran so far is shown; the same command continues
                    deadline = 0.0
            if rounds_done(folder) < 1:
                break
            line = _line(table, cell, accuracies(folder), data_root)
            lines.append({**line, "seconds": seconds(folder)})
            state = f"after {rounds_done(folder)} of {cell.rounds} rounds"
            progress.console.print(f"{cell.row}, {cell.method}: {lines[-1]['ours']:.1f} % {state}")
    return lines


def _line(table: Table, cell: Cell, by_round: list[float | None], data_root: str) -> dict[str, Any]:
    own = find_method(str(cell.ours["strategy"]))
    others = {method.table_name for method in all_methods().values()}
    others.discard(own.table_name if own else "")
    texts = [
        f"{key} {value}, not {cell.full.get(key, 'the default')}"
        for key, value in cell.ours.items()
        if value != cell.full.get(key) and key.partition(".")[0] not in others
    ]
    if table.samples:
        samples = _num_samples(str(cell.ours["dataset"]), data_root)
        if samples != table.samples:
            texts.append(f"{samples:,} training samples, not {table.samples:,}")
    return {
        "row": cell.row,
        "method": cell.method,
        "paper": cell.paper and cell.paper.value,
        "source": cell.paper and cell.paper.source,
        "ours": by_round[-1],
        "by_round": by_round,
        "difference": "; ".join(texts),
    }


@cache
def _num_samples(dataset: str, data_root: str) -> int:
    return len(load_dataset(dataset, data_root or None).train)


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
            table.name, table.title, cells, missing_for(table, data_root) or "nothing", table.gpu
        )
    console.print(printed)
    console.print("python -m benchmarks.papers TABLE [--quick] [--data-root DIR]", markup=False)


def main() -> None:
    """List the tables, or run one and print it."""
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=tables, metavar="TABLE", help="see --list")
    parser.add_argument("--list", action="store_true", help="all tables, and what is missing here")
    parser.add_argument("--row", metavar="NAME", help="this row of the table alone")
    parser.add_argument("--method", metavar="NAME", help="this method alone")
    parser.add_argument("--quick", action="store_true", help="a smaller setting")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after this time; run again to continue"
    )
    parser.add_argument(
        "--workers", type=int, help="processes that train; default: one a core or GPU"
    )
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
    if missing := missing_for(table, arguments.data_root):
        parser.error(f"{table.name} cannot be run here: {missing}")
    cells = [
        cell
        for cell in table.cells(quick=arguments.quick)
        if arguments.row in (None, cell.row) and arguments.method in (None, cell.method)
    ]
    if not cells:
        rows, methods = (
            ", ".join(names) for names in ((r.name for r in table.rows), table.methods)
        )
        parser.error(f"{table.name} has the rows {rows} and the methods {methods}")
    lines = run_table(
        table,
        cells,
        data_root=arguments.data_root,
        out=arguments.out,
        console=console,
        seconds_at_most=arguments.seconds,
        workers=arguments.workers,
    )
    print_table(table, lines, console)
    if arguments.json is not None:
        content = {"table": table.name, "quick": arguments.quick, "cells": lines}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
