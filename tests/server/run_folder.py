"""What a run has written into its folder."""

import json
import time


def read_lines(file):
    """Entries of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_times(file):
    """Entries of a journal that was just written, with their times checked and removed."""
    lines = read_lines(file)
    for line in lines:
        assert abs(line.pop("time", time.time()) - time.time()) < 600
    return lines


def rows(folder):
    """The rounds of a run."""
    return read_lines(folder / "metrics.jsonl")


def journal(folder, key=""):
    """Entries of a run's journal that have a key; all without one."""
    return [entry for entry in read_lines(folder / "journal.jsonl") if not key or key in entry]
