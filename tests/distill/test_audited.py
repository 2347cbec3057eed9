"""The audit's numbers are given for what was audited, on the safe side, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flwr_distill.distill.audited import MEASURED, Audited, Kind, audited
from flwr_distill.distill.virtual_data import VirtualData

DOCS = Path(__file__).parents[2] / "docs"
ROWS = {
    Kind("dm", "class-stats", 1, 1, 71): Audited(0.003, 0.03),
    Kind("dm", "class-stats", 1, 10, 71): Audited(0.008, 0.09),
    Kind("dm", "class-stats", 1, 1, 5): Audited(0.1, 0.4),
}


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr("flwr_distill.distill.audited.MEASURED", ROWS)


def virtual(per_class=1, **changed):
    labels = torch.arange(2).repeat_interleave(per_class)
    images = torch.randn(len(labels), 1, 8, 8)
    made = VirtualData(images, labels, "dm", steps=1, seed=0, init="class-stats")
    return replace(made, **changed)


def real(smallest):
    return torch.tensor([0] * smallest + [1] * 200)


@pytest.mark.parametrize(
    ("per_class", "smallest", "row"),
    [
        (1, 71, ROWS[Kind("dm", "class-stats", 1, 1, 71)]),
        (1, 200, ROWS[Kind("dm", "class-stats", 1, 1, 71)]),
        (1, 70, ROWS[Kind("dm", "class-stats", 1, 1, 5)]),
        (2, 71, ROWS[Kind("dm", "class-stats", 1, 10, 71)]),
        (1, 4, None),
        (2, 70, None),
        (11, 200, None),
    ],
)
def test_the_next_worse_kind_counts(per_class, smallest, row):
    assert audited(virtual(per_class), real(smallest)) == row


def test_a_start_that_was_not_audited_counts_as_real_images(monkeypatch):
    worst = Audited(0.5, 0.9)
    monkeypatch.setattr(
        "flwr_distill.distill.audited.MEASURED", ROWS | {Kind("dm", "real", 1, 1, 71): worst}
    )
    assert audited(virtual(init="noise"), real(71)) == worst
    assert audited(virtual(), real(71)) == ROWS[Kind("dm", "class-stats", 1, 1, 71)]


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "kip"},
        {"init": "noise"},
        {"formation": 2},
        {"method": "dm-private"},
        {"images": torch.randn(2, 64, 1, 1)},
    ],
)
def test_what_was_not_audited_has_no_numbers(changed):
    assert audited(virtual(**changed), real(71)) is None


def test_what_shows_more_than_the_better_kinds_is_alarming():
    assert [row.alarming for row in ROWS.values()] == [False, False, True]
    assert "finds 10.0% of ordinary images and 40% of the most" in str(Audited(0.1, 0.4))


def test_the_numbers_are_those_of_the_documented_table():
    table = (DOCS / "privacy.md").read_text().partition("## Attacks on virtual data")[2]
    shown = {}
    for line in table.partition("**Few images of a class")[0].splitlines():
        if not line.startswith("| `"):
            continue
        distiller, start, kind, _, _, _, _, ordinary, *worst = line.strip("| ").split(" | ")
        per_class = int(kind.partition(",")[0])
        formation = 2 if "2 x 2" in kind else 1
        found = Audited(*(max(map(_first_number, cells)) for cells in ([ordinary], worst)))
        shown[Kind(distiller.strip("`"), start, formation, per_class, 71)] = found
    assert len(shown) == 18
    assert shown == {kind: row for kind, row in MEASURED.items() if kind.real == 71}


def _first_number(cell):
    return float(cell.partition(" ")[0])
