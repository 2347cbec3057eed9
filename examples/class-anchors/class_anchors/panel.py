"""The report: a section on how many classes each node reported."""

from class_anchors.method import CLASS_MEANS
from flwr_distill.strategies.common.sections import RunFiles, Section, Table


def survey(run: RunFiles) -> Section | None:
    """Return the section; None for a run without a survey."""
    surveys = [entry for entry in run.journal if entry.get("phase") == CLASS_MEANS]
    if not surveys:
        return None
    last = surveys[-1]["nodes"]
    rows = [[run.name(node), f"{numbers['num-classes']:.0f}"] for node, numbers in last.items()]
    text = f"{len(surveys)} surveys asked nodes for the mean features of their classes."
    return Section("Class anchors", [text], [Table(["node", "#classes reported last"], rows)])
