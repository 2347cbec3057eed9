"""The parts of ``make gpu``: a command each, its time limit, and what of its results is shown."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_federation import line as federation_line

SPARE_SECONDS = 15.0
"""Before its limit, a part that can end by itself does so."""


@dataclass(frozen=True)
class Place:
    """Where the parts run.

    Parameters
    ----------
    gpu : bool
        False: small versions on the CPU.
    data_root : Path
        Folder with MNIST.
    runs : Path
        Folder of runs that a later call continues.
    """

    gpu: bool
    data_root: Path
    runs: Path

    @property
    def device(self) -> str:
        """Device of the parts' ``--device``."""
        return "cuda" if self.gpu else "cpu"


@dataclass(frozen=True)
class Part:
    """A part of ``make gpu``.

    Parameters
    ----------
    name : str
        For ``PARTS``.
    limit : float
        Seconds after which it is stopped.
    command : callable
        Arguments for Python in a place; results go to the given file.
    read : callable
        What the file has: figures for the JSON, with ``goals`` if there are any.
    show : callable
        Lines of Markdown about the figures.
    """

    name: str
    limit: float
    command: Callable[[Place, Path], list[str]]
    read: Callable[[Path], dict[str, Any]]
    show: Callable[[dict[str, Any]], list[str]]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def _json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {"rows": content}


def _doctor(place: Place, file: Path) -> list[str]:
    program = (
        "import contextlib, sys; from flwr_distill.cli.main import app\n"
        "with open(sys.argv[1], 'w') as file, contextlib.redirect_stdout(file):\n"
        "    app(['doctor', '--json'])"
    )
    return ["-c", program, str(file)]


def _show_doctor(figures: dict[str, Any]) -> list[str]:
    rows = [[row["check"], row["state"], row["found"]] for row in figures["rows"]]
    return table(["check", "state", "found"], rows)


def _tests(place: Place, file: Path) -> list[str]:
    chosen = ["-m", "gpu" if place.gpu else "not gpu", "tests/gpu"]
    output = ["-v", "--tb=short", "--durations=15", f"--junitxml={file}"]
    return ["-m", "pytest", "--timeout=60", *output, *chosen]


def _read_tests(file: Path) -> dict[str, Any]:
    # A test that was interrupted is written without a name.
    cases = [case for case in ElementTree.parse(file).iter("testcase") if case.get("name")]
    by_outcome: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in cases:
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in tags else outcome
        by_outcome[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:10]
    times = {case.get("name"): float(case.get("time", 0)) for case in slowest}
    return {**by_outcome, "slowest_seconds": times}


def _show_tests(figures: dict[str, Any]) -> list[str]:
    counts = [f"{len(figures[outcome])} {outcome}" for outcome in ("passed", "failed", "skipped")]
    return [", ".join(counts), *(f"- failed: {name}" for name in figures["failed"])]


def _steps(place: Place, file: Path) -> list[str]:
    return ["-m", "benchmarks.gpu", "--quick", "--device", place.device, "--json", str(file)]


def _show_steps(figures: dict[str, Any]) -> list[str]:
    def number(row: dict[str, Any], *keys: str, form: str = ".3f") -> str:
        value: Any = row
        for key in keys:
            value = value.get(key) if value else None
        return "-" if value is None else format(value, form)

    rows = [
        [
            name,
            *(number(row, way, "milliseconds") for way in ("graph", "eager", "published")),
            number(row, "published_by_ours", form=".1f"),
            number(row, "profile", row.get("way", ""), "kernels", form=".0f"),
            number(row, "most_waits", form=".0f"),
            number(row, "launch_floor_milliseconds"),
            number(row, "floor_milliseconds", form=".4f"),
        ]
        for name, row in figures["rows"].items()
    ]
    columns = ["step", "graph [ms]", "eager [ms]", "published [ms]", "published / ours"]
    failed = [
        f"- {name}: {row['error']}" for name, row in figures["rows"].items() if "error" in row
    ]
    floors = ["kernels", "waits", "launch floor [ms]", "arithmetic or memory floor [ms]"]
    return [*table(columns + floors, rows), *failed]


def _federation(place: Place, file: Path) -> list[str]:
    options = ["--device", place.device, "--data-root", str(place.data_root), "--json", str(file)]
    return ["-m", "benchmarks.device_federation", *options, *([] if place.gpu else ["--quick"])]


def _show_federation(figures: dict[str, Any]) -> list[str]:
    return [f"- {federation_line(row)}" for row in figures["rows"]]


def _simulation(place: Place, file: Path) -> list[str]:
    options = ["--device", place.device, "--json", str(file)]
    size = ["--case", "pfl", "--repeats", "1"] if place.gpu else ["--quick"]
    return ["-m", "benchmarks.simulation", *options, *size]


def _show_simulation(figures: dict[str, Any]) -> list[str]:
    rows = []
    for row in figures["rows"]:
        case = row["case"]
        for way, rates in row["rates"].items():
            seconds = sorted(row["seconds"][way])[len(rates) // 2]
            cells = [case["name"], f"{case['a_round']} of {case['clients']}", way]
            rows.append([*cells, f"{sorted(rates)[len(rates) // 2]:.0f}", f"{seconds:.2f}"])
    return table(["network", "clients a round", "way", "client steps/s", "a round [s]"], rows)


def _paper(place: Place, file: Path) -> list[str]:
    row = ["hfldd-iii", "--where", "method=FedAvg"]
    options = ["--data-root", str(place.data_root), "--out", str(place.runs), "--json", str(file)]
    options += ["--seconds", str(PAPER.limit - SPARE_SECONDS), *([] if place.gpu else ["--small"])]
    return ["-m", "benchmarks.papers", *row, *options]


def _show_paper(figures: dict[str, Any]) -> list[str]:
    (row,) = figures["rows"]
    (accuracies,) = row["by_round"].values() or [[None]]
    ours, paper = row["ours"].get("rounds", {"mean": None})["mean"], row["paper"]
    return [
        f"- HFLDD's table III, {row['place']['method']}: {accuracies[-1]} % after "
        f"{len(accuracies) - 1} rounds",
        f"- rounds to the table's accuracy: {'not yet' if ours is None else ours}; "
        f"the paper has {paper['rounds']} (both count from 0)",
        f"- differs: {'; '.join(row['differences']) or 'nothing'}",
    ]


PAPER = Part("paper", 60, _paper, _json, _show_paper)
PARTS = [
    Part("doctor", 20, _doctor, _json, _show_doctor),
    Part("tests", 80, _tests, _read_tests, _show_tests),
    Part("steps", 120, _steps, _json, _show_steps),
    Part("federation", 130, _federation, _json, _show_federation),
    Part("simulation", 70, _simulation, _json, _show_simulation),
    PAPER,
]
