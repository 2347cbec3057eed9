"""What a run cost: bytes and time."""

from collections import defaultdict
from typing import Any

from flwr_distill.protocol.registry import phase_titles
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import data_size, seconds
from flwr_distill.strategies.common.sections import Section, Table


def traffic(run: RunFiles) -> Section | None:
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


def times(run: RunFiles) -> Section | None:
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
