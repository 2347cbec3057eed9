"""Numbers and names in log lines, errors and pages."""

from collections.abc import Sequence

MAX_NAMES = 5
"""Names that a text lists; the others are counted."""


def counted(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``, ``1,200 nodes``; for nouns with a plural in -s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``, or the first names and how many others."""
    shown = list(names[:MAX_NAMES])
    if left := len(names) - len(shown):
        shown.append(f"{left} {'other' if left == 1 else 'others'}")
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last
