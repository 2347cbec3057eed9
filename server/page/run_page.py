"""Report of one run: its sections, but for learning curves, privacy and the method's own."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flwr_distill.base.files import replacing
from flwr_distill.base.text import counted
from flwr_distill.protocol.registry import phase_titles
from flwr_distill.server.page.beyond_accuracy import beyond_accuracy
from flwr_distill.server.page.by_node import by_node
from flwr_distill.server.page.codecs import codecs
from flwr_distill.server.page.drawings import cluster_nodes, cluster_star, dot_plot, leader_grid
from flwr_distill.server.page.layout import SCROLLING, page
from flwr_distill.server.page.learning import learning
from flwr_distill.server.page.method import panels
from flwr_distill.server.page.numbers import numbers
from flwr_distill.server.page.privacy import privacy
from flwr_distill.server.page.run_files import REPORT, RunFiles, flat, read_run
from flwr_distill.server.page.statistics import faults_of_data, held_by_nodes
from flwr_distill.server.page.words import between, data_size, seconds, spans
from flwr_distill.strategies.common.sections import Figure, Section, Table

MAX_ERRORS = 20
MAX_WARNINGS = 100
MAX_IN_HALF = 14
"""With more nodes or rounds, a drawing takes the full width of the page."""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the files in a run's folder."""
    report = folder / REPORT
    page = run_page(read_run(folder))
    with replacing(report, durable=False) as partial:
        partial.write_text(page, encoding="utf-8")
    return report


def run_page(run: RunFiles) -> str:
    """HTML page of a run; sections without content are omitted."""
    sections = [
        _errors(run),
        faults_of_data(run),
        None if run.statistics else _notices(run),  # which are among its faults
        held_by_nodes(run),
        None if run.evaluated or run.statistics else learning(run),
        by_node(run),
        beyond_accuracy(run),
        _topology(run),
        _partition(run),
        _traffic(run),
        codecs(run),
        _times(run),
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


def _topology(run: RunFiles) -> Section | None:
    """Clusters and who led them; None if the strategy has no clusters."""
    clusters = run.topology.get("clusters")
    if not clusters:
        return None
    groups = run.topology.get("groups") or [cluster_nodes(cluster) for cluster in clusters]
    colour_of = {node: index for index, group in enumerate(groups) for node in group}
    stars = [cluster_star(c.get("head"), c["members"], colour_of) for c in clusters]
    sizes = [len(cluster_nodes(cluster)) for cluster in clusters]
    nodes = counted(sizes[0], "node") if len(sizes) == 1 else f"{between(sizes)} nodes"
    led = any(cluster.get("head") is not None for cluster in clusters)
    caption = f"At the end of the run: {counted(len(clusters), 'cluster')}, of {nodes}"
    caption += ", each with its head or leader (filled) in the middle." if led else "."
    if run.topology.get("groups"):
        colours = counted(len(groups), "homogeneous group")
        caption += f" Colours are the {colours}: nodes with similar labels."
    drawing = Markup('<div class="clusters">{}</div>').format(Markup().join(stars))
    figures = [Figure("Clusters", caption, drawing, wide=sum(sizes) > MAX_IN_HALF)]
    heads = run.topology.get("heads", {})
    if led and len({tuple(sorted(those)) for those in heads.values()}) > 1:
        figures.append(
            Figure(
                "Who led",
                "A row for each node that was ever a head or leader, a column for each round: "
                "filled when it was one.",
                SCROLLING.format(leader_grid(run.topology)),
                wide=len(heads) > MAX_IN_HALF,
            )
        )
    return Section("Who worked with whom", figures=figures)


def _partition(run: RunFiles) -> Section | None:
    """Samples by node and class; None if the settings do not determine them."""
    if not run.partition or run.statistics:
        return None
    classes = [sum(count > 0 for count in counts) for counts in run.partition.values()]
    sizes = [sum(counts) for counts in run.partition.values()]
    largest = max(max(counts) for counts in run.partition.values())
    caption = (
        f"A column for each node, a row for each class; the largest dot is {largest} samples. "
        f"Nodes hold {between(classes)} classes and {between(sizes)} samples, held-out samples "
        "included."
    )
    drawing = SCROLLING.format(dot_plot(run.partition, run.class_name))
    figure = Figure("Samples", caption, drawing, wide=len(sizes) > MAX_IN_HALF)
    text = (
        "Computed from the settings, which say how the data set is split. Class counts are "
        "private: nodes were not asked for them, and private data sets are not shown."
    )
    return Section("What nodes hold", [text], figures=[figure])


def _traffic(run: RunFiles) -> Section | None:
    """Bytes by phase and link, next to the papers' formulas; None if none are on record."""
    if not run.traffic:
        return None
    entries = sorted(
        (
            (size, phase, link)
            for phase, links in run.traffic["measured"].items()
            for link, size in links.items()
            if size
        ),
        reverse=True,
    )
    if not entries:
        return None
    titles = phase_titles()
    rows = [
        [titles.get(phase, phase), link.replace("->", " → "), data_size(size)]
        for size, phase, link in entries
    ]
    bars = [size / entries[0][0] for size, _, _ in entries]
    server = sum(size for size, _, link in entries if "server" in link)
    nodes = sum(size for size, _, link in entries if "server" not in link)
    payload = sum(sum(links.values()) for links in run.traffic["payloads"].values())
    totals = [
        ("measured: all records through the server", server),
        ("measured: arrays and parcels through the server", payload),
        ("measured: between nodes", nodes),
        *((f"formula: {name}", size) for name, size in run.traffic["formulas"].items()),
    ]
    largest = max(size for _, size in totals)
    return Section(
        "Bytes",
        [
            "Measured on the records of every message. Parcels that the server relays between "
            "nodes count on its links, up and down, and once more between nodes. Formulas count "
            "what their paper counts: training and its preparation, not evaluation on nodes."
        ],
        [
            Table(
                ["what", "#size"],
                [[name, data_size(size)] for name, size in totals],
                [size / largest for _, size in totals],
            ),
            Table(["phase", "link", "#size"], rows, bars),
        ],
    )


def _times(run: RunFiles) -> Section | None:
    """How long each phase took; None if no phase is on record."""
    phases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in run.journal:
        if "phase" in entry:
            phases[entry["phase"]].append(entry)
    if not phases:
        return None
    titles = phase_titles()
    totals = {phase: sum(e["seconds"] for e in entries) for phase, entries in phases.items()}
    rows = [
        [
            titles.get(phase, phase),
            str(len(entries)),
            f"{sum(len(e['nodes']) for e in entries)} of {sum(e['asked'] for e in entries)}",
            seconds(totals[phase]),
            seconds(totals[phase] / len(entries)),
            seconds(max(e["seconds"] for e in entries)),
        ]
        for phase, entries in phases.items()
    ]
    in_rounds = sum(e["seconds"] for e in run.journal if "phase" in e and e["round"])
    if run.rows:
        totals["server"] = max(0.0, run.rows[-1]["seconds"] - in_rounds)
        rows.append(["server, between phases", "", "", seconds(totals["server"]), "", ""])
    longest = max(totals.values()) or 1
    return Section(
        "Time",
        ["A phase lasts from its first message to its last reply or its deadline."],
        [
            Table(
                ["phase", "#times", "#replies", "#seconds", "#mean", "#longest"],
                rows,
                [total / longest for total in totals.values()],
            )
        ],
    )
