"""Writes a run's report when it is over."""

from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.common import log

from flwr_distill.server.hooks import Hook, RunEnd
from flwr_distill.server.page.run_page import write_report


class Report(Hook):
    """Writes ``report.html`` of the files in a run's folder: the last of our hooks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Write the report so far."""
        log(INFO, "Report so far: %s", write_report(self._folder).resolve())

    def on_run_end(self, end: RunEnd) -> None:
        """Write the report."""
        log(INFO, "Report: %s", write_report(self._folder).resolve())
