"""What a run has written into its folder."""

import json


def read_lines(file):
    """Entries of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows(folder):
    """The rounds of a run."""
    return read_lines(folder / "metrics.jsonl")


def journal(folder, key=""):
    """Entries of a run's journal that have a key; all without one."""
    return [entry for entry in read_lines(folder / "journal.jsonl") if not key or key in entry]
