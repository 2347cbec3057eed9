"""What a reader has to know before the results: errors, and warnings about the federation."""

from collections import defaultdict

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.strategies.common.sections import Section

MOST_ERRORS = 20


def errors(run: RunFiles) -> Section | None:
    """Failed rounds and why the run ended, the last first; None without errors."""
    texts = list(rounds_by_text(run, "error"))
    return Section("What went wrong", texts[: -MOST_ERRORS - 1 : -1], alarm=True) if texts else None


def notices(run: RunFiles) -> Section | None:
    """Warnings of ``about.json``; None without any."""
    warnings = run.about.get("warnings")
    return Section("Warnings", list(warnings)) if warnings else None


def rounds_by_text(run: RunFiles, kind: str) -> dict[str, list[int]]:
    """Texts of a kind in the journal, with nodes by name, and the rounds of each."""
    rounds: dict[str, list[int]] = defaultdict(list)
    for entry in run.journal:
        if kind in entry:
            rounds[run.named(entry[kind])].append(entry["round"])
    return rounds
