"""Which run is meant: by its id, by the first digits of it, or as the one that started last."""

import fcntl
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from flwr_distill.task.errors import ReportedError

LATEST = "latest"
SETTINGS, JOURNAL, LOCK = "settings.json", "journal.jsonl", ".lock"


class RunIdError(ReportedError):
    """A text stands for no run, or for several."""


def by_start(runs_dir: Path) -> list[Path]:
    """Folders of runs, the one that started last is the last; some have not met their nodes."""
    files = [*runs_dir.glob(f"*/{SETTINGS}"), *runs_dir.glob(f"*/{JOURNAL}")]
    return sorted({file.parent for file in files}, key=_started)


def _started(folder: Path) -> float:
    """When a run started; files' times differ in a copy, so they count only without ``started``."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return datetime.fromisoformat(about["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        file = next(file for name in (SETTINGS, JOURNAL) if (file := folder / name).exists())
        return file.stat().st_mtime


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine has locked a run's folder: the run is in progress."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def full_id(text: str, ids: Sequence[str]) -> str:
    """The id that equals a text, or the only one that begins with it; ``latest`` is the last one.

    Raises RunIdError if there is none, or there are several.
    """
    if text in ids:
        return text
    if text == LATEST and ids:
        return ids[-1]
    matches = [each for each in ids if text and each.startswith(text)]
    if len(matches) > 1:
        shown = ", ".join(matches[:3]) + (" ..." if len(matches) > 3 else "")
        problem = f"{text} begins {len(matches)} ids: {shown}"
        raise RunIdError(problem, remedy="give more digits")
    if not matches:
        raise RunIdError(f"no run {text}")
    return matches[0]
