"""Figures of a benchmark: what runs wrote, what it writes itself, and cells of its tables."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_json(file: Path | None, figures: Any) -> None:
    """Write figures to a file, if one is named."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def spread(values: Sequence[float], places: int = 2) -> str:
    """Median of some values, with the least and the greatest."""
    numbers = (statistics.median(values), min(values), max(values))
    median, least, most = (f"{number:,.{places}f}" for number in numbers)
    return f"{median} ({least}-{most})"


def key_value(text: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``; a value that is no number or the like is a text."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
