"""Reads a run's folder."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr_distill.server.names import named
from flwr_distill.server.record.run_ids import is_locked
from flwr_distill.server.settings import default_settings
from flwr_distill.task.errors import ReportedError

REPORT = "report.html"
FLOWER_ID = re.compile(r"\b\d{15,20}\b")


class RunFilesError(ReportedError):
    """The folder contains no run, or a file in it is malformed."""


@dataclass(frozen=True)
class RunFiles:
    """Content of a run's folder.

    Fields are empty where files are missing: in a run that is in progress or was killed, or that
    an older version wrote.
    """

    folder: Path
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: list[dict[str, Any]]
    journal: list[dict[str, Any]]
    topology: Mapping[str, Any]
    traffic: Mapping[str, Any]
    partition: Mapping[str, Any]
    statistics: Mapping[str, Any]
    """What nodes counted, in a run that asked for nothing else."""

    @property
    def title(self) -> str:
        """Strategy, or the model that was evaluated, and data set."""
        what = f"{self.evaluated}, evaluated" if self.evaluated else self.settings["strategy"]
        if self.settings.get("statistics"):
            what = "statistics"
        return f"{what} on {self.settings['dataset']}"

    @property
    def evaluated(self) -> str:
        """Name of the file or run that was evaluated; empty for a run that trains."""
        return Path(self.settings.get("evaluate", {}).get("model", "")).name

    @property
    def state(self) -> str:
        """``done``, ``failed``, ``stopped``, ``running`` or ``killed`` (no word)."""
        if (self.folder / "summary.json").exists():
            return "done"
        last = self.journal[-1] if self.journal else {}
        if "error" in last or "stopped" in last:
            return "failed" if "error" in last else "stopped"
        return "running" if is_locked(self.folder) else "killed"

    @property
    def scored(self) -> list[dict[str, Any]]:
        """Rows of the rounds whose model the server evaluated."""
        return [row for row in self.rows if row["accuracy"] is not None]

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The strategy, and settings that differ from the defaults, by dotted key."""
        defaults = flat(default_settings())
        settings = flat(self.settings)
        changed = {key: value for key, value in settings.items() if defaults.get(key) != value}
        return {"strategy": settings["strategy"]} | changed

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the nodes by Flower's id, of which a resumed run has given them others."""
        own = {node: entry["name"] for node, entry in self.about.get("nodes", {}).items()}
        names = {**self.about.get("earlier", {}), **own}
        return {node: short(name) for node, name in names.items()}

    def name(self, node: str) -> str:
        """Name of a node, from its Flower id."""
        return self.names.get(node, short(node))

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes by label; runs of earlier versions may have none."""
        labels = self.about.get("spec", {}).get("labels", {})
        return labels.get("classes") or self.about.get("classes") or []

    def class_name(self, label: int) -> str:
        """Name of a class; without names its label."""
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def reported(self, key: str) -> Iterator[tuple[int, str, float]]:
        """Round, node and value, wherever a node reported a metric."""
        for entry in self.journal:
            for node, numbers in entry.get("nodes", {}).items():
                if key in numbers:
                    yield entry["round"], self.name(node), numbers[key]

    def artifact(self, file: str) -> bytes:
        """Content of a file that the strategy left; empty if there is none."""
        path = self.folder / file
        return path.read_bytes() if path.exists() else b""

    def named(self, text: str) -> str:
        """Replace Flower's node ids in a text by names."""
        return named(text, self.name)


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run; RunFilesError if it is none, or a file is malformed."""
    if not (folder / "settings.json").is_file():
        raise RunFilesError(
            "it is not the folder of a run: no settings.json in it",
            where=folder,
            remedy="flwr-distill runs list names the runs",
        )
    return RunFiles(
        folder=folder,
        settings=_json(folder / "settings.json"),
        about=_json(folder / "about.json"),
        rows=_lines(folder / "metrics.jsonl"),
        journal=_lines(folder / "journal.jsonl"),
        topology=_json(folder / "topology.json"),
        traffic=_json(folder / "traffic.json"),
        partition=_json(folder / "partition.json"),
        statistics=_json(folder / "statistics.json"),
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into dotted keys: ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    keys: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[prefix + key] = value
    return keys


def short(name: str) -> str:
    """Shorten Flower's long ids in a name to their last digits."""
    return FLOWER_ID.sub(lambda match: f"…{match[0][-5:]}", name)


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    return _parsed(_text(file), file) or {}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Lines of a file, without a half-written last one (the process was killed)."""
    if not file.exists():
        return []
    whole, _, _ = _text(file).rpartition("\n")
    return [_parsed(line, file) or {} for line in whole.splitlines()]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFilesError(f"malformed: {error}", where=file, remedy="copy it again") from error


def _parsed(text: str, file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RunFilesError(f"malformed: {error}", where=file) from error
    if not isinstance(content, dict | None):
        raise RunFilesError(f"malformed: a {type(content).__name__}, not an object", where=file)
    return content
