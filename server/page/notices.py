"""What a reader has to know before the results: warnings about the federation."""

from server.page.run_files import RunFiles
from strategies.common.sections import Section


def notices(run: RunFiles) -> Section | None:
    """Warnings of ``about.json``; None without any."""
    warnings = run.about.get("warnings")
    return Section("Warnings", list(warnings)) if warnings else None
