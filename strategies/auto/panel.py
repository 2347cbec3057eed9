"""What the report says of the contests."""

import json

from flwr_distill.protocol.method import CHOICE
from flwr_distill.strategies.common.sections import RunFiles, Section, Table

TRAINED = ("strategy", "#rounds trained", "#MB through the server")


def choice(run: RunFiles) -> Section | None:
    """Return what trained, and the results of contests; None before the run's end."""
    content = run.artifact(CHOICE)
    if not content:
        return None
    found = json.loads(content)
    reason, tried = found["reason"], found["tried"]
    text = [f"{reason[0].upper()}{reason[1:]}."]
    if len(tried) == 1:
        return Section("Strategy", [f"{text[0]} So {tried[0]['strategy']} trained."])
    trained = [
        [each["strategy"], str(each["rounds"]), f"{each['server_bytes'] / 1e6:.1f}"]
        for each in tried
    ]
    names = [each["strategy"] for each in tried]
    columns = ("#contest", *(f"#{name}" for name in names), "leads")
    contests = [
        [str(number), *(_shown(results, name) for name in names), next(iter(results))]
        for number, results in enumerate(found["contests"], start=1)
    ]
    text.append(
        "In a contest each trained a round from the best model so far. The second table has their "
        "accuracies on the samples that nodes hold out."
    )
    return Section("Strategy", text, [Table(TRAINED, trained), Table(columns, contests)])


def _shown(results: dict[str, float | None], name: str) -> str:
    accuracy = results.get(name)
    return "-" if accuracy is None else f"{accuracy:.1%}"
