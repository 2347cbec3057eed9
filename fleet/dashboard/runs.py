"""A run as the dashboard shows it: from its folder, and from what the SuperLink says of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from flwr_distill.fleet.dashboard.files import Lines, read_json
from flwr_distill.fleet.submission import KILLED, gave_no_reason
from flwr_distill.flower.control import KnownRun
from flwr_distill.server.names import named
from flwr_distill.server.page.run_files import REPORT
from flwr_distill.server.record.phase_file import PHASE

MAX_PROBLEMS = 200
"""Latest warnings, errors and failed nodes of a run that are kept."""
MAX_ROWS = 5000
"""Rounds of a run that are kept."""
MAX_NODES = 5000
NO_TITLE = "a run that has not met its nodes"
DAY = 86_400.0
PACE = 5
"""Rounds by which the time left is estimated."""
PATIENCE, PATIENT_ROUNDS = 20.0, 5
"""Seconds, and usual rounds, for which a run may wait without that being a problem."""
RECENT = 20
"""Latest problems with which a new one is compared."""
LATEST_TIME = 4e9
"""Seconds since 1970 up to which a time is one."""
MAX_TEXT = 500
"""Characters of a text that a run wrote."""
MAX_NAME = 80
MAX_PHASE = 2**20
"""Bytes of a file about a phase."""
STALE = 10.0
"""Seconds after which a phase that is not updated is no longer what the run does."""


@dataclass(frozen=True)
class Problem:
    """Something that went wrong in a run, in words; `node` is a name, empty if it is about none.

    What happens `count` times is one problem, from the time `first` on.
    """

    time: float
    round: int
    kind: str
    """``error``, ``warning``, ``failed`` (of a node) or ``rejected`` (of a node's reply)."""
    text: str
    node: str = ""
    count: int = 1
    first: float = 0.0

    def repeats(self, other: Problem) -> bool:
        """Whether it is another problem once more."""
        return (self.kind, self.text, self.node) == (other.kind, other.text, other.node)


@dataclass(frozen=True)
class RunNode:
    """A node as it described itself to a run."""

    name: str
    version: str = ""
    device: str = ""
    samples: int | None = None


@dataclass(frozen=True)
class Phase:
    """What a run waits for, since when, until when, and for whom.

    `others` counts awaited nodes without a name. Times are in seconds since 1970.
    """

    title: str
    since: float
    until: float
    asked: int
    awaited: Sequence[str]
    others: int = 0

    @property
    def missing(self) -> int:
        """Nodes that have not replied."""
        return len(self.awaited) + self.others


@dataclass(frozen=True)
class Run:
    """A run at one time; accuracies are in [0, 1], times in seconds since 1970."""

    run_id: str
    title: str
    state: str
    """``pending``, ``starting``, ``running``, ``completed``, ``failed`` or ``stopped``; it is
    ``unfinished`` if the SuperLink does not know it and its files do not say how it ended."""
    why: str
    """Why it failed."""
    started: float
    ended: float
    round: int
    num_rounds: int
    server_curve: Sequence[tuple[float, float]]
    node_curve: Sequence[tuple[float, float]]
    phase: Phase | None
    server_bytes: int
    link_bytes: int
    pace: float | None
    """Seconds that each of the last rounds took."""
    problems: Sequence[Problem]
    warnings: Sequence[str]
    """About the federation, which a reader has to know before the results."""
    nodes: Mapping[str, RunNode]
    folder: Path | None
    """None until it has met its nodes."""

    @property
    def live(self) -> bool:
        """Whether the SuperLink says that it is not over."""
        return self.state in ("pending", "starting", "running")

    @property
    def stalls(self) -> bool:
        """Whether it waits for far longer than a round usually takes."""
        usual = max(PATIENCE, PATIENT_ROUNDS * (self.pace or 0.0))
        return self.phase is not None and time.time() - self.phase.since > usual

    @property
    def eta(self) -> float | None:
        """Seconds to its end at its pace; None if that is unknown, or it stalls."""
        if self.state != "running" or self.pace is None or self.stalls:
            return None
        return self.pace * max(0, self.num_rounds - self.round)

    @property
    def has_report(self) -> bool:
        """Whether its report is written."""
        return self.folder is not None and (self.folder / REPORT).is_file()

    @property
    def accuracy(self) -> float | None:
        """The last known one: on the server's test samples, else the mean of nodes."""
        curve = self.server_curve or self.node_curve
        return curve[-1][1] if curve else None


class Row(NamedTuple):
    """A round; NaN for accuracies that are unknown."""

    round: int
    accuracy: float
    node_accuracy: float
    server_bytes: int
    link_bytes: int
    seconds: float


@dataclass
class RunFolder:
    """The files of a run's folder, read as they grow."""

    path: Path
    title: str = NO_TITLE
    num_rounds: int = 0
    started: float = 0.0
    warnings: Sequence[str] = ()
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    problems: deque[Problem] = field(default_factory=lambda: deque(maxlen=MAX_PROBLEMS))
    nodes: Mapping[str, RunNode] = field(default_factory=dict)
    run_id: str = ""
    """Of the run that wrote here last: a resumed run continues in the folder of an earlier one."""
    done: bool = False
    _earlier: Mapping[str, str] = field(default_factory=dict)
    _last: str = ""
    _signature: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self._rows = Lines(self.path / "metrics.jsonl")
        self._journal = Lines(self.path / "journal.jsonl")

    def update(self) -> None:
        """Read what is new."""
        signature = tuple(
            _stamp(self.path / name)
            for name in ("settings.json", "about.json", "summary.json", PHASE, *_GROWING)
        )
        if signature == self._signature:
            return
        settings, about = (read_json(self.path / f"{name}.json") for name in ("settings", "about"))
        self.title, self.num_rounds = _title(settings), whole(settings.get("num-rounds"))
        self.started, self.warnings = _started(about), _texts(about.get("warnings"))
        self.done = (self.path / "summary.json").is_file()
        self.nodes, self._earlier = dict(_nodes(about)), _earlier_names(about)
        run_id = text_of(read_json(self.path / PHASE, MAX_PHASE).get("run"), 20)
        self.run_id = run_id if run_id.isdigit() else self.path.name
        restarted, rows = self._rows.new()
        if restarted:
            self.rows.clear()
        self.rows.extend(_row(row) for row in rows)
        restarted, lines = self._journal.new()
        if restarted:
            self.problems.clear()
            self._last = ""
        if lines:
            last = lines[-1]
            self._last = "failed" if "error" in last else "stopped" if "stopped" in last else ""
        for line in [line for line in lines if line.keys() & _KINDS][-MAX_PROBLEMS:]:
            self._note(line)
        if not (self._rows.is_behind or self._journal.is_behind):
            self._signature = signature

    @property
    def state(self) -> str:
        """How it ended by its files; ``unfinished`` if they do not say."""
        return "completed" if self.done else self._last or "unfinished"

    def name(self, node: str) -> str:
        """Name of a node, from its Flower id."""
        if node in self.nodes:
            return self.nodes[node].name
        return self._earlier.get(node) or f"node …{text_of(node[-5:])}"

    def phase(self) -> Phase | None:
        """What the run waits for now; None if its file says nothing recent."""
        content = read_json(self.path / PHASE, MAX_PHASE)
        title = text_of(content.get("phase"), MAX_NAME)
        if not title or time.time() - moment_of(content.get("time")) > STALE:
            return None
        awaited = content.get("awaited")
        names = awaited[:MAX_NODES] if isinstance(awaited, list) else []
        return Phase(
            title,
            moment_of(content.get("since")) or time.time(),
            moment_of(content.get("until")),
            whole(content.get("asked")),
            [text_of(name, MAX_NAME) for name in names],
            whole(content.get("others")),
        )

    def _note(self, line: Mapping[str, Any]) -> None:
        for key, kind in _KINDS.items():
            if key not in line:
                continue
            of_node = key in ("failed", "set_aside")
            text = line.get("reason") if of_node else line[key]
            node = self.name(str(line[key])) if of_node else ""
            where = f"{text_of(line.get('reply_to'), MAX_NAME)}: " if of_node else ""
            words = named(text_of(text), self.name)
            moment = moment_of(line.get("time"))
            new = Problem(moment, whole(line.get("round")), kind, where + words, node, 1, moment)
            self._add(new, words if of_node else "")

    def _add(self, new: Problem, reason: str) -> None:
        """Add a problem; a node's `reason` is also in a warning of the log, which is dropped."""
        recent = [self.problems.pop() for _ in range(min(RECENT, len(self.problems)))]
        for old in reversed(recent):
            if new.repeats(old):
                new = replace(new, count=new.count + old.count, first=old.first)
            elif not (old.kind == "warning" and reason and reason in old.text):
                self.problems.append(old)
        if new.kind != "warning" or not any(_says(old, new) for old in recent):
            self.problems.append(new)


def _says(old: Problem, warning: Problem) -> bool:
    """Whether a node's problem is what a warning of the same round is about."""
    reason = old.text.partition(": ")[2]
    return bool(old.node and reason) and old.round == warning.round and reason in warning.text


_GROWING = ("metrics.jsonl", "journal.jsonl")
_KINDS = {"error": "error", "warning": "warning", "failed": "failed", "set_aside": "rejected"}


def run_of(folder: RunFolder | None, known: KnownRun | None) -> Run:
    """A run by its folder, by what the SuperLink says, or both."""
    rows = list(folder.rows) if folder else []
    last = rows[-1] if rows else Row(0, math.nan, math.nan, 0, 0, 0.0)
    state = known.status.status.removeprefix("finished:") if known else ""
    state = state or (folder.state if folder else "unfinished")
    return Run(
        run_id=str(known.run_id) if known else folder.path.name if folder else "",
        title=folder.title if folder else NO_TITLE,
        state=state,
        why=_why(state, folder, known),
        started=known.submitted if known else folder.started if folder else 0.0,
        ended=known.ended if known else 0.0,
        round=last.round,
        num_rounds=folder.num_rounds if folder else 0,
        server_curve=_curve((row.round, row.accuracy) for row in rows),
        node_curve=_curve((row.round, row.node_accuracy) for row in rows),
        phase=folder.phase() if folder and state == "running" else None,
        server_bytes=last.server_bytes,
        link_bytes=last.link_bytes,
        pace=_pace(rows),
        problems=list(folder.problems)[::-1] if folder else [],
        warnings=folder.warnings if folder else (),
        nodes=folder.nodes if folder else {},
        folder=folder.path if folder else None,
    )


def number(value: Any, otherwise: float = math.nan) -> float:
    """A finite number that a run wrote; `otherwise` for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 and math.isfinite(value) else otherwise


def moment_of(value: Any) -> float:
    """A time that a run wrote, in seconds since 1970; 0 for anything that is none."""
    moment = number(value, 0.0)
    return moment if 0 <= moment < LATEST_TIME else 0.0


def whole(value: Any) -> int:
    """A count that a run wrote; 0 for anything else."""
    return max(0, int(number(value, 0.0)))


def text_of(value: Any, limit: int = MAX_TEXT) -> str:
    """A text that a run wrote, in one printable line of at most `limit` characters."""
    if not isinstance(value, str):
        return ""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(value[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 2]} …"


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.lstat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _texts(value: Any) -> list[str]:
    return [text_of(text) for text in value[:20]] if isinstance(value, list) else []


def _nodes(about: Mapping[str, Any]) -> list[tuple[str, RunNode]]:
    nodes = about.get("nodes")
    found = []
    for node, entry in list(nodes.items())[:MAX_NODES] if isinstance(nodes, dict) else []:
        if isinstance(entry, dict):
            samples = entry.get("samples")
            found.append(
                (
                    node,
                    RunNode(
                        text_of(entry.get("name"), MAX_NAME) or f"node …{text_of(node[-5:])}",
                        text_of(entry.get("version"), MAX_NAME),
                        text_of(entry.get("device"), MAX_NAME),
                        whole(samples) if samples is not None else None,
                    ),
                )
            )
    return found


def _earlier_names(about: Mapping[str, Any]) -> dict[str, str]:
    """Names by the ids that nodes had before the run was resumed."""
    names = about.get("earlier")
    pairs = list(names.items())[:MAX_NODES] if isinstance(names, dict) else []
    return {node: text_of(name, MAX_NAME) for node, name in pairs}


def _title(settings: Mapping[str, Any]) -> str:
    strategy = text_of(settings.get("strategy"), MAX_NAME)
    data = text_of(settings.get("dataset"), MAX_NAME)
    if settings.get("statistics"):
        strategy = "statistics"
    evaluate = settings.get("evaluate")
    if model := text_of(evaluate.get("model"), MAX_TEXT) if isinstance(evaluate, dict) else "":
        strategy = f"{Path(model).name}, evaluated"
    return f"{strategy} on {data}" if strategy else NO_TITLE


def _why(state: str, folder: RunFolder | None, known: KnownRun | None) -> str:
    details = text_of(known.status.details) if known else ""
    if state != "failed":
        return details
    errors = [p.text for p in folder.problems if p.kind == "error"] if folder else []
    if errors:
        return errors[-1]
    return KILLED if not details or gave_no_reason(details) else details


def _started(about: Mapping[str, Any]) -> float:
    try:
        started = datetime.fromisoformat(about["started"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0
    return started if 0 <= started < time.time() + DAY else 0.0


def _row(row: Mapping[str, Any]) -> Row:
    return Row(
        whole(row.get("round")),
        number(row.get("accuracy")),
        number(row.get("node_accuracy")),
        whole(row.get("server_bytes")),
        whole(row.get("link_bytes")),
        number(row.get("seconds")),
    )


def _curve(points: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(x, min(1.0, max(0.0, y))) for x, y in points if not math.isnan(y)]


def _pace(rows: Sequence[Row]) -> float | None:
    """Seconds that each of the last rounds took; None before the first."""
    if len(rows) < 2:
        return None
    first, last = rows[-1 - min(PACE, len(rows) - 1)], rows[-1]
    rounds, seconds = last.round - first.round, last.seconds - first.seconds
    return seconds / rounds if rounds > 0 and seconds >= 0 else None
