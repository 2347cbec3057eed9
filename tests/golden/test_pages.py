"""The report of recorded runs, down to each line that is drawn."""

from pathlib import Path

import pytest

from flwr_distill.server.page.comparison_page import comparison_page
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page

RUNS = Path(__file__).parent / "runs"


def body(page):
    """Without the head, which is the same on all pages."""
    return page[page.index("<body>") :]


@pytest.mark.parametrize("run", sorted(folder.name for folder in RUNS.iterdir()))
def test_the_page_of_a_recorded_run_is_the_approved_one(run, same_text):
    same_text(f"{run}.html", body(run_page(read_run(RUNS / run))))


def test_the_comparison_of_recorded_runs_is_the_approved_one(same_text):
    runs = [read_run(folder) for folder in sorted(RUNS.iterdir())]
    same_text("comparison.html", body(comparison_page(runs, RUNS)))
