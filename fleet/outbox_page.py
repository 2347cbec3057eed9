"""The outbox log as a page for a data protection officer."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from flwr_distill.base.text import counted
from flwr_distill.node.outbox import Entry, OutboxError, entries, log_file, virtual_data_file
from flwr_distill.server.page.layout import page
from flwr_distill.server.page.words import data_size
from flwr_distill.strategies.common.sections import Figure, Section, Table

if TYPE_CHECKING:
    from flwr_distill.distill.virtual_data import VirtualData

COLUMNS = ("time", "run", "message", "to", "what", "#bytes", "#epsilon")
MAX_UNFOLDED = 30
"""Lines of a table; longer ones are folded."""
MAX_PICTURES = 40
"""Sets of virtual data with a picture, newest first."""
MAX_BYTES = 2**26
"""Of one set with a picture, unpacked."""

_NEEDED = {"run", "strategy", "type", "data", "time", "bytes"}
_NEEDED_OF_REPLIES = {"what", "virtual", "classes"}

EXPLAINED = (
    "Everything that left this node, in order. The server reads what it receives. A parcel for "
    "another node is sealed: the server passes it on and cannot read it, unless it lied about that "
    "node's key. Epsilon bounds what a run has revealed about any one sample; the epsilons of runs "
    "on the same data add up."
)


def read_log(folder: Path) -> tuple[list[Entry], str]:
    """The lines of a log up to the first that is damaged, and what is; empty if none is."""
    lines: list[Entry] = []
    try:
        for entry in entries(folder):
            needed = _NEEDED if "error" in entry else _NEEDED | _NEEDED_OF_REPLIES
            if missing := needed - entry.keys():
                problem = f"line {entry['number']} has no {', '.join(sorted(missing))}"
                return lines, f"{log_file(folder)}: {problem}"
            lines.append(entry)
    except OutboxError as error:
        return lines, str(error)
    return lines, ""


def outbox_page(lines: Sequence[Entry], folder: Path, broken: str, back: str = "") -> str:
    """Render a page that needs no other file, of the lines before the chain breaks, if it does.

    `back` is the dashboard's first page, if that shows it.
    """
    left = [line for line in lines if "error" not in line]
    refused = [line for line in lines if "error" in line]
    sections = [
        *([Section("This log was changed", [broken], alarm=True)] if broken else []),
        Section("What this is", [EXPLAINED, *_last_hash(lines)]),
        *([Section("By run", tables=[_runs(lines)])] if lines else []),
        *_virtual_data(left, folder),
    ]
    if left:
        sections.append(Section("All that left", tables=[_table(left, "All messages")]))
    if refused:
        only = "Only these texts left, in place of an answer."
        table = _table(refused, "All errors and refusals")
        sections.append(Section("Errors and refusals", [only], [table]))
    return page("What left this node", _subtitle(lines), sections, _numbers(lines), back)


def _subtitle(lines: Sequence[Entry]) -> str:
    if not lines:
        return "Nothing has left it."
    return f"{_time(lines[0])} to {_time(lines[-1])}"


def _last_hash(lines: Sequence[Entry]) -> list[str]:
    if not lines:
        return []
    text = "Note the last line's hash elsewhere: a log that was cut off or rewritten has another. "
    return [Markup("{}<code>{}</code>").format(text, lines[-1]["hash"])]


def _numbers(lines: Sequence[Entry]) -> list[tuple[str, str]]:
    lifetime: dict[str, float] = {}
    for line in lines:
        if "lifetime" in line:
            lifetime[line["data"]] = line["lifetime"]
    return [
        ("messages", str(len(lines))),
        ("bytes", data_size(sum(line["bytes"] for line in lines))),
        ("runs", str(len({line["run"] for line in lines}))),
        *((f"epsilon on {data}", f"{epsilon:.3g}") for data, epsilon in lifetime.items()),
    ]


def _runs(lines: Sequence[Entry]) -> Table:
    runs: dict[str, list[Entry]] = {}
    for line in lines:
        runs.setdefault(line["run"], []).append(line)
    rows = []
    for run, of_run in runs.items():
        epsilons = [line["epsilon"] for line in of_run if line.get("epsilon") is not None]
        rows.append(
            [
                run,
                of_run[0]["strategy"],
                _time(of_run[0]),
                str(len(of_run)),
                data_size(sum(line["bytes"] for line in of_run)),
                f"{max(epsilons):.3g}" if epsilons else "-",
            ]
        )
    return Table(["run", "strategy", "began", "#messages", "#bytes", "#epsilon"], rows)


def _table(lines: Sequence[Entry], title: str) -> Table:
    return Table(
        COLUMNS, [cells(line) for line in lines], folded=title * (len(lines) > MAX_UNFOLDED)
    )


def cells(line: Entry) -> list[str]:
    """Cells of a line, in the order of `COLUMNS`."""
    receivers = [
        f"node {parcel['to']}, {parcel['link']}: {parcel.get('purpose', 'a parcel')}"
        for parcel in line.get("parcels", [])
    ]
    epsilon, title = line.get("epsilon"), line.get("title")
    return [
        _time(line),
        f"{line['run']} {line['strategy']}",
        f"{title} ({line['type']})" if title else line["type"],
        "; ".join(["server", *receivers]),
        line["error"] if "error" in line else "; ".join(line["what"]),
        data_size(line["bytes"]),
        "-" if epsilon is None else f"{epsilon:.3g}",
    ]


def _time(line: Entry) -> str:
    return str(line["time"])[:16].replace("T", " ")


def _virtual_data(lines: Sequence[Entry], folder: Path) -> Iterator[Section]:
    classes = {name: line["classes"] for line in lines for name in line["virtual"]}
    names = list(dict.fromkeys(name for line in reversed(lines) for name in line["virtual"]))
    if not names:
        return
    from flwr_distill.distill.errors import VirtualDataError  # here: imports torch
    from flwr_distill.distill.features import are_vectors
    from flwr_distill.distill.virtual_data import VirtualData

    figures, missing, vectors = [], 0, 0
    for name in names[:MAX_PICTURES]:
        try:
            data = virtual_data_file(folder, name).read_bytes()
            virtual = VirtualData.from_bytes(data, MAX_BYTES)
            if are_vectors(virtual.images.shape):
                vectors += 1
            else:
                figures.append(_picture(virtual, name, classes[name]))
        except (OSError, VirtualDataError):
            missing += 1
    shown = "" if len(names) <= MAX_PICTURES else f" The last {MAX_PICTURES} are shown."
    text = [
        f"{counted(len(names), 'set')} of virtual images left.{shown} Look whether one shows a "
        "person. Pixels are stretched from black to white."
    ]
    if vectors:
        text.append(f"{counted(vectors, 'set')} of features cannot be shown as images.")
    if missing:
        most = data_size(MAX_BYTES)
        text.append(
            f"{counted(missing, 'file')} cannot be read, or is larger than {most} unpacked."
        )
    yield Section("Virtual data that left", text, figures=figures)


def _picture(virtual: VirtualData, name: str, class_names: Sequence[str]) -> Figure:
    from flwr_distill.distill.contact_sheet import contact_sheet

    others = range(len(class_names), int(virtual.labels.max()) + 1)  # called by their labels
    classes = [*class_names, *map(str, others)]
    png = BytesIO()
    sheet = contact_sheet(virtual.images, virtual.labels, classes, virtual.formation)
    sheet.save(png, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    card = virtual.card
    caption = f"{counted(len(virtual), 'image')} by {virtual.method}, from {virtual.init}."
    if card is not None:
        nearest = ", ".join(f"{key} {value:.3g}" for key, value in card.numbers().items())
        caption += f" Privacy card: {nearest}."
    return Figure(
        name[:12],
        caption,
        Markup('<img class="sheet" alt="virtual images by class" src="{}">').format(source),
    )
