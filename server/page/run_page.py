"""Report of one run: its sections in order; here those on faults and settings."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from flwr_distill.server.page.costs import times, traffic
from flwr_distill.server.page.federation import partition, topology
from flwr_distill.server.page.layout import page
from flwr_distill.server.page.learning import learning
from flwr_distill.server.page.method import panels
from flwr_distill.server.page.numbers import numbers
from flwr_distill.server.page.privacy import privacy
from flwr_distill.server.page.run_files import REPORT, RunFiles, flat, read_run
from flwr_distill.server.page.words import spans
from flwr_distill.strategies.common.sections import Section, Table

MAX_ERRORS = 20
MAX_WARNINGS = 100


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the files in a run's folder."""
    report = folder / REPORT
    report.write_text(run_page(read_run(folder)), encoding="utf-8")
    return report


def run_page(run: RunFiles) -> str:
    """HTML page of a run; sections without content are omitted."""
    sections = [
        _errors(run),
        _notices(run),
        learning(run),
        topology(run),
        partition(run),
        traffic(run),
        times(run),
        _faults(run),
        *panels(run),
        privacy(run),
        _settings(run),
    ]
    started = str(run.about.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    return page(
        run.title,
        f"Run {run.folder.name}" + (f", started {started}" if started else ""),
        [section for section in sections if section],
        numbers(run),
    )


def _errors(run: RunFiles) -> Section | None:
    """Failed rounds and why the run ended, the last first."""
    texts = list(_rounds_by_text(run, "error"))
    return Section("What went wrong", texts[: -MAX_ERRORS - 1 : -1], alarm=True) if texts else None


def _notices(run: RunFiles) -> Section | None:
    """Warnings about the federation, which a reader has to know before the results."""
    warnings = run.about.get("warnings")
    return Section("Warnings", list(warnings)) if warnings else None


def _faults(run: RunFiles) -> Section:
    """Warnings in the run's log; equal ones are listed once, with their rounds."""
    rounds = _rounds_by_text(run, "warning")
    if not rounds:
        return Section("Faults", ["None: no warning in the log, no reply rejected."])
    rows = [[text, spans(numbers), str(len(numbers))] for text, numbers in rounds.items()]
    text = "All warnings in the run's log: nodes that failed or were late, replies rejected."
    if len(rows) > MAX_WARNINGS:
        text += f" The first {MAX_WARNINGS} of {len(rows)}; journal.jsonl has them all."
    table = Table(["warning", "rounds", "#times"], rows[:MAX_WARNINGS])
    return Section("Faults", [text], [table])


def _rounds_by_text(run: RunFiles, kind: str) -> dict[str, list[int]]:
    """Texts of a kind in the journal, with nodes by name, and the rounds of each."""
    rounds: dict[str, list[int]] = defaultdict(list)
    for entry in run.journal:
        if kind in entry:
            rounds[run.named(entry[kind])].append(entry["round"])
    return rounds


def _settings(run: RunFiles) -> Section:
    all_settings = _rows(flat(run.settings))
    tables = [
        Table(["setting", "value"], _rows(run.changed_settings)),
        Table(["setting", "value"], all_settings, folded=f"All {len(all_settings)} settings"),
        Table(["package", "version"], _rows(run.about.get("versions", {})), folded="Versions"),
    ]
    read = [
        [node["name"], str(node["samples"]), node["fingerprint"]]
        for node in run.about.get("nodes", {}).values()
        if node.get("fingerprint")
    ]
    if own := run.about.get("fingerprint"):
        read.append(["server", "", own])
    if read:
        tables.append(Table(["data of", "#samples", "fingerprint"], read, folded="Data as read"))
    if run.class_names:  # runs of earlier versions may have none
        outputs = [[str(label), name] for label, name in enumerate(run.class_names)]
        title = f"Label map {run.about.get('labels', '')}"
        tables.append(Table(["output", "class"], outputs, folded=title))
    text = "The strategy, and settings that differ from the defaults:"
    return Section("Settings", [text], tables)


def _rows(values: Mapping[str, object]) -> list[list[str]]:
    return [[key, str(value)] for key, value in values.items()]
