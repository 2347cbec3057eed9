"""Tables of the papers beside ours: the paper's numbers, ours, and what differs in the setting.

``python -m benchmarks.papers --list [--data-root DIR]``

All tables, with the number of cells, and what is missing to run them.

``python -m benchmarks.papers TABLE [--small] [--seeds N ...] [--where KEY=VALUE ...] [--seconds S]
[--workers N] [--data-root DIR] [--out DIR] [--json FILE]``

A run for each cell and seed, with the real apps in worker processes: a preset, and what the cell
changes of it. Cells that one run answers share it, also between tables. With ``--workers 1`` nodes
run in this process, one by one; results are the same. ``--small`` is a setting for two cores, the
same for all rows; each difference is printed. ``--where method=HFLDD C=1 C=2`` takes some rows.

Accuracies are in percent: of the global model on the server's test samples, or the nodes'
unweighted mean where each node brings its own. With several seeds: mean and standard deviation.
``test ±`` is half the 95 % interval by bootstrap over the test samples, where the paper prints one.

Runs are kept in ``--out``. Those that are over are not run again; one that was interrupted, or that
``--seconds`` ended, continues after its last round. On a GPU, nodes with the same message train in
a batch. The JSON file has the accuracy after each round, and the seconds by type of message and in
all: of a core with ``--workers 1``, else of a worker. A figure is drawn into ``--out``.

The papers' numbers are in ``benchmarks/papers/facts``; how a table is run, in
``benchmarks/papers/tables``, whose ``__init__.py`` explains the format.
"""

import argparse
import math
import time
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.figures import write_json
from benchmarks.in_process import Settings
from benchmarks.papers.bootstrap import half_interval
from benchmarks.papers.facts import MEASURED
from benchmarks.papers.plots import draw
from benchmarks.papers.runs import METRICS, ROOT, Result, below, rounds_to, run_row
from benchmarks.papers.tables import CLIENT, MEAN, TARGET, Row, Table, read_tables
from flwr_distill.cli.run_log import print_table as print_in_parts
from flwr_distill.protocol.registry import all_methods, find_method
from flwr_distill.strategies.common.sections import Table as Printed
from flwr_distill.task.datasets.registry import dataset_files
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import server_data

OUT = Path("runs") / "papers"
MEBIBYTE = 2**20
PRIVATE = "private"
Numbers = dict[str, float | None]


class OutOfTime(BaseException):
    """The time for a table is over; not an error that a server would take for a node's."""


def missing_for(row: Row, data_root: str) -> tuple[str, ...]:
    """What a row needs and is nowhere or not on this machine; empty if nothing."""
    if row.missing:
        return row.missing
    named = {str(node.get("dataset", "")) for node in row.nodes} | {str(row.ours["dataset"])}
    folder = below(row.ours, data_root)[ROOT]
    absent = [name for name in sorted(named - {PRIVATE, ""}) if not _is_there(name, folder)]
    return (f"no files of {', '.join(absent)} in --data-root",) if absent else ()


@cache
def _is_there(dataset: str, data_root: str) -> bool:
    files = [] if ":" in dataset else dataset_files(dataset, data_root or None)
    return not files or any(file.exists() for file in files)


def _num_samples(settings: Settings, data_root: str) -> tuple[int, int]:
    """Samples to train and to test on, by the run's split of its data set."""
    data = server_data(TaskSettings.from_run_config(below(settings, data_root)))
    return (len(data.train), len(data.test)) if data else (0, 0)


def run_rows(
    rows: list[Row],
    seeds: list[int],
    *,
    data_root: str,
    out: Path,
    console: Console,
    seconds_at_most: float,
    workers: int | None,
) -> None:
    """Run what is left of the rows, seed by seed, until time is up or Ctrl-C."""
    deadline = time.monotonic() + seconds_at_most
    runs = {row.folder(out, seed): (row, seed) for seed in seeds for row in rows}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        bar = progress.add_task("rounds", total=sum(row.rounds for row, _ in runs.values()))

        def show(folder: Path, before: int) -> None:
            progress.update(bar, completed=before + Result(folder).rounds)
            if time.monotonic() > deadline:
                raise OutOfTime

        before = 0
        for folder, (row, seed) in runs.items():
            name = f"{', '.join(f'{k} {v}' for k, v in row.place.items())}, seed {seed}"
            progress.update(bar, description=f"rounds; {name}")
            if Result(folder).rounds < row.rounds and time.monotonic() < deadline:
                try:
                    run_row(row, seed, folder, data_root, partial(show, folder, before), workers)
                except OutOfTime:
                    pass
                except KeyboardInterrupt:  # what ran so far is shown; the same command continues
                    deadline = 0.0
            result = Result(folder)
            if result.rounds:
                before += result.rounds
                progress.update(bar, completed=before)
                state = f"after {result.rounds} of {row.rounds} rounds"
                progress.console.print(f"{name}: {result.by_round[-1]} % {state}", highlight=False)


def our_numbers(table: Table, row: Row, result: Result) -> Numbers:
    """What a run of a row gives, by the keys of the paper's cells and by metric."""
    series = result.by_round
    client = str(row.place.get(CLIENT, MEAN))
    if client != MEAN:
        series = [None, *result.by_node[table.place_of(client)]]
    trained = [accuracy for accuracy in series[1:] if accuracy is not None]
    numbers: Numbers = {
        name: metric(trained) if trained else None for name, metric in METRICS.items()
    }
    if table.metric == "round-trips":
        return {"formula": result.round_trips, **numbers}
    if table.metric != "rounds":
        return {"value": numbers[table.metric], **numbers}
    stated = row.place.get(TARGET, table.results().target_accuracy if table.facts else None)
    target = row.target or stated
    reached = rounds_to(series, float(target or 0))
    if reached is None:
        return {"rounds": None, **numbers}
    formula = result.formula_bytes(reached)
    return {
        "rounds": reached - 1 + table.first_round,
        "accuracy": series[reached],
        "traffic_mb": None if formula is None else formula / MEBIBYTE,
        "measured_mb": result.measured_bytes(reached) / MEBIBYTE,
        **numbers,
    }


def by_formula(row: Row) -> dict[str, str]:
    """A formula of round trips, such as ``2 M T``, with its value in our run."""
    if "formula" not in row.cell.numbers or row.missing:
        return {}
    settings = {"M": "fedhead.sectors", "N": "min-nodes", "T": "num-rounds"}
    formula = str(row.cell.numbers["formula"])
    factors = [
        int(word if word.isdigit() else row.ours[settings[word]]) for word in formula.split()
    ]
    return {"formula": f"{formula} = {math.prod(factors)}"}


def compared(table: Table, rows: list[Row], by_row: list[Numbers]) -> None:
    """Add traffic and speed of one seed's rows relative to the table's reference method."""

    def others(row: Row) -> frozenset[Any]:
        return frozenset((k, v) for k, v in row.place.items() if k != "method")

    pairs = list(zip(rows, by_row, strict=True))
    reference = {others(row): numbers for row, numbers in pairs if row.method == table.relative_to}
    for row, numbers in pairs:
        base = reference.get(others(row), {})
        if (own := numbers.get("traffic_mb")) and (first := base.get("traffic_mb")):
            numbers["ratio"] = own / first
        if (rounds := numbers.get("rounds")) and (slow := base.get("rounds")):
            numbers["speedup"] = slow / rounds


def lines_of(
    table: Table, rows: list[Row], seeds: list[int], out: Path, data_root: str
) -> list[dict[str, Any]]:
    """A line for each row: its place, the paper's numbers, ours, and what differs."""
    missing = [missing_for(row, data_root) for row in rows]
    ours: list[dict[int, Numbers]] = [{} for _ in rows]
    results: list[dict[int, Result]] = [{} for _ in rows]
    for seed in seeds:
        for index, row in enumerate(rows):
            if not missing[index] and (result := Result(row.folder(out, seed))).rounds > 0:
                results[index][seed] = result
                ours[index][seed] = numbers = our_numbers(table, row, result)
                if "deviation" in row.cell.numbers and (value := numbers.get("value")):
                    _, tested = _num_samples(row.ours, data_root)
                    numbers["deviation"] = half_interval(value, tested, seed)
        ran = [index for index in range(len(rows)) if seed in ours[index]]
        compared(table, [rows[i] for i in ran], [ours[i][seed] for i in ran])
    return [
        {
            "place": row.place,
            "paper": {**row.cell.numbers, **by_formula(row)},
            "remark": row.cell.remark,
            "missing": "; ".join(missing[index]),
            "ours": summary(list(ours[index].values())),
            "rounds": [result.rounds for result in results[index].values()],
            "of_rounds": 0 if missing[index] else row.rounds,
            "by_round": {seed: result.by_round for seed, result in results[index].items()},
            "seconds": {seed: result.seconds for seed, result in results[index].items()},
            "differences": [] if missing[index] else differences(row, data_root),
        }
        for index, row in enumerate(rows)
    ]


def summary(by_seed: list[Numbers]) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation of each number over seeds; None where a seed has none."""
    keys = dict.fromkeys(key for numbers in by_seed for key in numbers)
    numbers = {}
    for key in keys:
        values = [each.get(key) for each in by_seed]
        known = [value for value in values if value is not None]
        whole = len(known) == len(values)
        numbers[key] = {
            "mean": fmean(known) if whole else None,
            "deviation": stdev(known) if whole and len(known) > 1 else None,
            "by_seed": values,
        }
    return numbers


def differences(row: Row, data_root: str) -> list[str]:
    """What differs in our run from the paper's setting."""
    others = _tables_of_others(str(row.ours["strategy"]))
    texts = [
        f"{key} {value}, not {row.full.get(key, 'the default')}"
        for key, value in row.ours.items()
        if value != row.full.get(key) and key.partition(".")[0] not in others
    ]
    if row.samples:
        samples, _ = _num_samples(row.ours, data_root)
        if samples != row.samples:
            texts.append(f"{samples:,} training samples, not {row.samples:,}")
    return [*texts, *([row.differs] if row.differs else [])]


@cache
def _tables_of_others(strategy: str) -> set[str]:
    """Tables of settings that a strategy does not read."""
    own = find_method(strategy)
    return {m.table_name for m in all_methods().values()} - {own.table_name if own else ""}


def print_table(
    table: Table, lines: list[dict[str, Any]], console: Console, *, small: bool
) -> None:
    """Print the rows, and what differs in all of them."""
    keys = list(dict.fromkeys(key for line in lines for key in line["place"]))
    kept = {name for line in lines for name in (*line["paper"], *line["ours"])}
    measured = [key for key in MEASURED if key in kept and key not in ("deviation", "reached")]
    able = [line for line in lines if not line["missing"]]
    common = [
        text
        for text in (able[0]["differences"] if able else [])
        if all(text in line["differences"] for line in able)
    ]
    columns = [f"{key}, {whose}" for key in measured for whose in ("paper", "ours")]
    printed = []
    for line in lines:
        place = [str(line["place"].get(key, "")) for key in keys]
        numbers = [
            text for key in measured for text in (_printed(line, key), _our_text(line["ours"], key))
        ]
        own = (text for text in line["differences"] if text not in common)
        printed.append([*place, *numbers, "; ".join(filter(None, (_state(line), *own)))])
    whole = Printed([*keys, *columns, "difference"], printed)
    print_in_parts(console, table.title, whole, len(keys))
    if table.facts:
        results = table.results()
        where = table.facts if table.facts.startswith("figure") else f"table {table.facts}"
        console.print(f"paper: {table.paper}, {where}; {results.metric}", markup=False)
    for remark in dict.fromkeys(line["remark"] for line in lines if line["remark"]):
        console.print(f"of the paper: {remark}", markup=False)
    for text in (*common, *([table.differs] if table.differs else [])):
        console.print(f"all rows: {text}", markup=False)
    if small and table.small_reason:
        console.print(f"--small: {table.small_reason}", markup=False)


def _state(line: dict[str, Any]) -> str:
    """Why a row has no numbers of ours, or those of too few rounds; empty if it is whole."""
    if line["missing"]:
        return f"cannot run here: {line['missing']}"
    if not line["rounds"]:
        return "not run yet"
    fewest = min(line["rounds"])
    return f"after {fewest} of {line['of_rounds']} rounds" if fewest < line["of_rounds"] else ""


def _printed(line: dict[str, Any], key: str) -> str:
    """The paper's number."""
    numbers = line["paper"]
    if key not in numbers:
        return "not reached" if numbers.get("reached") is False and key == "rounds" else "-"
    return f"{numbers[key]}" + (f" ± {numbers['deviation']}" if "deviation" in numbers else "")


def _our_text(ours: dict[str, dict[str, Any]], key: str) -> str:
    """Our number, or in how many seeds there is one."""
    if key not in ours:
        return "-"
    number = ours[key]
    if number["mean"] is None:
        have = [value for value in number["by_seed"] if value is not None]
        return f"in {len(have)} of {len(number['by_seed'])} seeds"
    spread = "" if number["deviation"] is None else f" ± {number['deviation']:.2f}"
    test = ours["deviation"]["mean"] if key == "value" and "deviation" in ours else None
    return f"{number['mean']:.2f}{spread}" + (f" (test ± {test:.2f})" if test else "")


def print_list(tables: dict[str, Table], data_root: str) -> None:
    """Print all tables, with their size and what is missing."""
    for table in tables.values():
        rows = table.rows(small=False)
        reasons = Counter(why for row in rows for why in missing_for(row, data_root))
        numbers = sum(
            isinstance(value, (int, float)) and not isinstance(value, bool)
            for row in rows
            for value in row.cell.numbers.values()
        )
        missing = "; ".join(f"{why} ({number} cells)" for why, number in reasons.items())
        small = "--small" if table.small else "no --small"
        print(f"{table.name}: {table.title}")
        print(f"  {len(rows)} cells, {numbers} numbers, {small}; needs a GPU: {table.gpu}")
        print(f"  cannot run here: {missing or 'nothing'}")
    print("python -m benchmarks.papers TABLE [--small] [--data-root DIR]")


def main() -> None:
    """List the tables, or run one and print it."""
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=tables, metavar="TABLE", help="see --list")
    parser.add_argument("--list", action="store_true", help="all tables, and what is missing here")
    parser.add_argument("--small", action="store_true", help="a setting for two cores")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", default=[0])
    parser.add_argument("--where", nargs="+", metavar="KEY=VALUE", default=[], help="these rows")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after this time; run again to continue"
    )
    parser.add_argument(
        "--workers", type=int, help="processes that train; default: one a core or GPU"
    )
    parser.add_argument("--data-root", default="", help="folder of the data sets")
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="keep the runs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    if arguments.list:
        print_list(tables, arguments.data_root)
        return
    if arguments.table is None:
        parser.error("name a table, or --list")
    console = Console()
    table: Table = tables[arguments.table]
    if arguments.small and not (table.small or table.missing):
        parser.error(f"{table.name} has no smaller setting")
    where = defaultdict(set)
    for pair in arguments.where:
        key, _, value = pair.partition("=")
        where[key].add(value)
    rows = table.rows(small=arguments.small)
    chosen = [row for row in rows if row.matches(where)]
    if not chosen:
        known = {key: {str(row.place.get(key, "")) for row in rows} for key in rows[0].place}
        texts = (f"{key}: {', '.join(sorted(values))}" for key, values in known.items())
        parser.error(f"no such row of {table.name}, which has {'; '.join(texts)}")
    able = [row for row in chosen if not missing_for(row, arguments.data_root)]
    run_rows(
        able,
        arguments.seeds,
        data_root=arguments.data_root,
        out=arguments.out,
        console=console,
        seconds_at_most=arguments.seconds,
        workers=arguments.workers,
    )
    lines = lines_of(table, chosen, arguments.seeds, arguments.out, arguments.data_root)
    print_table(table, lines, console, small=arguments.small)
    if table.plot:
        runs = [
            (row, Result(row.folder(arguments.out, n))) for row in able for n in arguments.seeds
        ]
        curves = [
            (row.place, [result for own, result in runs if own is row and result.rounds])
            for row in able
        ]
        file = arguments.out / f"{table.name}{'-small' if arguments.small else ''}.png"
        plot = table.plot, table.panel, table.targets
        draw(table.title, *plot, curves, file, table.running)
        console.print(f"drawn: {file}", markup=False)
    if arguments.json is not None:
        content = {
            "table": table.name,
            "small": arguments.small,
            "seeds": arguments.seeds,
            "rows": lines,
        }
        write_json(arguments.json, content)


if __name__ == "__main__":
    main()
