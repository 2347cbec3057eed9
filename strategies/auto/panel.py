"""Auto's panel of the report: what was taken, and why."""

import json

from flwr_distill.strategies.auto.method import CHOICE
from flwr_distill.strategies.common.sections import RunFiles, Section


def choice(run: RunFiles) -> Section | None:
    """Return the choice and its reason; None before the run's end."""
    content = run.artifact(CHOICE)
    if not content:
        return None
    reason = json.loads(content)["reason"]
    return Section("Strategy", [f"{reason[0].upper()}{reason[1:]}."])
