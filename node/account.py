"""The epsilon that has left a node over all runs, for each data set; it never falls.

The node books what replies claim that they cost. It outlasts runs, resumed ones and restarts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from flwr_distill.base.files import replacing
from flwr_distill.task.errors import SettingsError

_FORMAT = "flwr-distill/lifetime-epsilon/2"
_EMPTY: Mapping[str, Any] = {"left": 0.0, "runs": {}, "evaluations": 0, "marks": []}
_MAX_FILES = 100_000
"""Files of a folder whose names and sizes are part of its fingerprint."""
_READ_FILES = 256
"""Of these, how many are read, each up to ``_BYTES_EACH``."""
_BYTES_EACH = 1 << 12
_BYTES_OF_FILE = 1 << 24
"""Bytes that are read of a data set that is one file."""


@dataclass(frozen=True)
class DataSet:
    """A data set as its account knows it: by any of several marks, of which names change."""

    name: str
    """The name of its account, if there is none yet."""
    marks: frozenset[str] = frozenset()
    """Device and inode, and a fingerprint of the content. A copy has the second, a file or folder
    that was renamed both, one in which something changed the first."""

    @classmethod
    def at(cls, path: Path) -> Self:
        """The data set in a file or folder; one that is missing has a name only."""
        path = path.resolve()
        try:
            status = path.stat()
            content = _fingerprint(path)
        except OSError:
            return cls(str(path))
        inode = f"inode {status.st_dev}:{status.st_ino}"
        return cls(str(path), frozenset({inode, f"content {content}"}))


class LifetimeAccount:
    """Lifetime epsilon by data set, in a file that is synced before anything leaves.

    Runs on the same data add up. A run says what it has spent so far, and one that resumes another
    continues from there, so only the difference is added; if that is below 0, the run's account has
    restarted, and all of it is added.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._marks: dict[str, frozenset[str]] = {}

    def name_of(self, data: DataSet) -> str:
        """The name of a data set's account, for the methods below: one set has one account.

        Accounts that turn out to be of the same data are merged, with what each has spent. OSError
        if a merge is not writable.
        """
        accounts = self._read()
        marks = {name: frozenset(own["marks"]) for name, own in accounts.items()}
        same = [n for n in accounts if n == data.name or marks[n] & data.marks]
        name = same[0] if same else data.name
        self._marks[name] = data.marks.union(*(marks[each] for each in same))
        if len(same) > 1:
            joined = _joined([accounts[each] for each in same])
            others = {each: own for each, own in accounts.items() if each not in same}
            self._write({**others, name: self._marked(name, joined)})
        return name

    def left(self, data: str) -> float:
        """Epsilon that has left on a data set."""
        return float(self._read().get(data, _EMPTY)["left"])

    def evaluations(self, data: str) -> int:
        """Evaluations on a data set that have left."""
        return int(self._read().get(data, _EMPTY)["evaluations"])

    def after(self, data: str, run: str, claim: float | None) -> float:
        """Epsilon that will have left on a data set.

        `claim` is what a chain of resumed runs, named by its first, has spent by the reply.
        """
        return float(self._changed(self._read(), data, run, claim)[data]["left"])

    def book(self, data: str, run: str, claim: float | None) -> None:
        """Book what a reply claims that it costs; call it before the reply leaves."""
        if claim is not None:
            self._write(self._changed(self._read(), data, run, claim))

    def book_evaluation(self, data: str, epsilon: float) -> None:
        """Book an evaluation and what it costs; call it before the reply leaves."""
        self._add(data, epsilon, evaluations=1)

    def book_statistics(self, data: str, epsilon: float) -> None:
        """Book what noisy counts of the data cost; call it before they leave."""
        self._add(data, epsilon)

    def _add(self, data: str, epsilon: float, evaluations: int = 0) -> None:
        accounts = self._read()
        own = accounts.get(data, _EMPTY)
        sums = {"left": own["left"] + epsilon, "evaluations": own["evaluations"] + evaluations}
        self._write({**accounts, data: self._marked(data, {**own, **sums})})

    def _marked(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        return {**own, "marks": sorted(self._marks.get(name, frozenset()).union(own["marks"]))}

    def _write(self, accounts: Mapping[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps({"format": _FORMAT, "data": accounts}), encoding="utf-8")

    def _changed(
        self, accounts: Mapping[str, Any], data: str, run: str, claim: float | None
    ) -> dict[str, Any]:
        own = accounts.get(data, _EMPTY)
        last = own["runs"].get(run, 0.0)
        if claim is None:
            claim = last
        if math.isnan(claim) or claim < 0:
            claim = math.inf
        added = claim - last if claim >= last else claim
        runs = {**own["runs"], run: claim}
        changed = self._marked(data, {**own, "left": own["left"] + added, "runs": runs})
        return {**accounts, data: changed}

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SettingsError(f"unreadable: {error}", where=self._file) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise SettingsError(
                f"not an account of this version: {_FORMAT}",
                where=self._file,
                remedy="start the node with the version that wrote it",
            )
        accounts: dict[str, Any] = content["data"]
        return accounts


def _joined(accounts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One account with what several have spent, of each run the smallest claim."""
    runs: dict[str, float] = {}
    for own in accounts:
        for run, claim in own["runs"].items():
            runs[run] = min(claim, runs.get(run, math.inf))
    return {
        "left": sum(own["left"] for own in accounts),
        "runs": runs,
        "evaluations": sum(own["evaluations"] for own in accounts),
        "marks": sorted({mark for own in accounts for mark in own["marks"]}),
    }


def _fingerprint(path: Path) -> str:
    """SHA-256 of a file's size and first bytes; of a folder, of names, sizes and some bytes."""
    digest = hashlib.sha256()
    files = sorted(islice(_files(path), _MAX_FILES)) if path.is_dir() else [path]
    most = _BYTES_EACH if path.is_dir() else _BYTES_OF_FILE
    for place, file in enumerate(files):
        name = str(file.relative_to(path)) if path.is_dir() else ""
        digest.update(json.dumps([name, file.stat().st_size]).encode())
        if place < _READ_FILES:
            with file.open("rb") as content:
                digest.update(content.read(most))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Regular files at any depth; folders behind links are not entered."""
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            if file.is_file():
                yield file
