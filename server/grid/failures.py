"""Why nodes sent nothing usable, in a line."""

import re
from collections.abc import Mapping, Sequence

from flwr_distill.protocol.meeting import one_line
from flwr_distill.strategies.common.directory import by_reason

LONGEST_TEXT = 100_000
"""Characters of an error that are read: a node may send megabytes."""
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""Exception of a ClientApp, as Flower writes it into an error reply."""


def told(failures: Mapping[int, Sequence[str]]) -> str:
    """Reasons with their nodes, that of most nodes first; see `by_reason`."""
    distinct = {str(node): list(dict.fromkeys(reasons)) for node, reasons in failures.items()}
    return "; ".join(by_reason(distinct))


def reason_of(error_text: str) -> str:
    """What a node's error says, on one short line that is safe to print; see `one_line`."""
    text = error_text[:LONGEST_TEXT].strip()
    raised = RAISED.fullmatch(text)
    return one_line(f"{raised[1]}: {raised[2]}" if raised else text) or "no reason given"
