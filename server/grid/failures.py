"""Why nodes sent nothing usable, in a line."""

import re
from collections.abc import Mapping, Sequence

from strategies.common.directory import by_reason

LONGEST_REASON = 300
"""Characters of a reason in log, journal and errors."""
LONGEST_TEXT = 100_000
"""Characters of an error that are read: a node may send megabytes."""
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""Exception of a ClientApp, as Flower writes it into an error reply."""


def told(failures: Mapping[int, Sequence[str]]) -> str:
    """Reasons with their nodes, that of most nodes first; see `by_reason`."""
    distinct = {str(node): list(dict.fromkeys(reasons)) for node, reasons in failures.items()}
    return "; ".join(by_reason(distinct))


def first_line(reason: str) -> str:
    """First line of what a node says, short and without control characters."""
    reason = reason.strip()
    raised = RAISED.fullmatch(reason) if len(reason) <= LONGEST_TEXT else None
    line, _, _ = (f"{raised[1]}: {raised[2]}" if raised else reason[:LONGEST_TEXT]).partition("\n")
    return "".join(filter(str.isprintable, line))[:LONGEST_REASON] or "no reason given"
