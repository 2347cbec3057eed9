"""HTML reports: one run, or several compared, each a single self-contained file."""

from pathlib import Path

from server.page.comparison_page import comparison_page
from server.page.run_files import REPORT, RunFiles, RunFilesError, read_run
from server.page.run_page import run_page

__all__ = [
    "REPORT",
    "RunFiles",
    "RunFilesError",
    "comparison_page",
    "read_run",
    "run_page",
    "write_report",
]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the files in a run's folder."""
    report = folder / REPORT
    report.write_text(run_page(read_run(folder)), encoding="utf-8")
    return report
