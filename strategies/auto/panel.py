"""What the report says of the race."""

import json

from flwr_distill.protocol.method import CHOICE
from flwr_distill.strategies.common.sections import RunFiles, Section, Table

COLUMNS = ("strategy", "#rounds", "#accuracy on held-out samples", "#MB through the server")


def choice(run: RunFiles) -> Section | None:
    """Return what raced, and what follows; None before the run's end."""
    content = run.artifact(CHOICE)
    if not content:
        return None
    found = json.loads(content)
    rows = [
        [
            each["strategy"],
            str(each["rounds"]),
            "-" if each["accuracy"] is None else f"{each['accuracy']:.1%}",
            f"{each['server_bytes'] / 1e6:.1f}",
        ]
        for each in found["tried"]
    ]
    reason = found["reason"]
    text = [f"{reason[0].upper()}{reason[1:]}."]
    return Section("Strategy", text, [Table(COLUMNS, rows)] if len(rows) > 1 else [])
