"""The work of `flwr-distill data check`: look through the data, show and write what was found."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flwr_distill.base.text import counted
from flwr_distill.distill.contact_sheet import COLUMNS, contact_sheet
from flwr_distill.task.image_files import BACKGROUND, Treatment
from flwr_distill.task.settings import PrivateSettings
from flwr_distill.task.survey import STATE_COLUMNS, Survey, survey
from flwr_distill.task.table_survey import ColumnSurvey, TableSurvey, survey_table

SIDE = 64
"""Largest height and width of an image in the picture, in pixels."""
MOST_CLASSES = 100
"""Classes in the table and the picture; of more, the first are shown."""
MAX_CATEGORIES = 20
"""Categories of a column that are shown."""
MOST_EXAMPLES = 5
LONGEST_NAME = 30
DIM = 0.25
"""Brightest pixel, of 1, below which the data are probably stored in too wide a type."""

MEANINGS = {
    "unreadable": "cannot be used",
    "stray": "no image, or in the wrong place",
    "duplicate": "the same again in its class",
    "conflict": "the same in another class",
    "constant": "the same value in all rows",
    "overflow": "too large to standardise",
    "unit": "far from the stated mean",
}
TABLES = (".csv", ".parquet")
TREATMENTS: dict[Treatment, str] = {
    "turned": "turned or mirrored as its EXIF orientation says",
    "on background": f"with transparency, put on {BACKGROUND}",
    "scaled": "of more than 8 bits, scaled to 0 to 1",
    "reduced": "of 16 bits a colour, of which 8 are read",
    "windowed": "shown by the window in the file",
    "inverted": "with white as 0, inverted",
}


def look_through(
    path: Path, output: Path, console: Console, private: PrivateSettings | None = None
) -> Survey:
    """Show what is at `path`, and write ``classes.png`` and ``findings.csv`` to `output`.

    With `private`, which states columns, `path` is read as a table by a run with these settings.
    """
    thumbnails: defaultdict[str, list[Image.Image]] = defaultdict(list)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def watch(total: int, label: str, image: Image.Image | None) -> None:
            bar.update(task, advance=1, total=total or None)
            known = label in thumbnails or len(thumbnails) < MOST_CLASSES
            if image is not None and known and len(thumbnails[label]) < COLUMNS:
                image = image.convert("RGB")
                image.thumbnail((SIDE, SIDE))
                thumbnails[label].append(image)

        found: Survey
        if private and private.table:
            found = survey_table(path, private.table, private.class_names, watch)
        else:
            found = survey(path, watch)
    console.print(_class_table(found))
    if found.sizes:
        modes = ", ".join(f"{mode} {number:,}" for mode, number in found.modes.most_common())
        console.print(f"Height x width {found.size_range()}; modes: {modes}", soft_wrap=True)
        console.print(_as_read(found), soft_wrap=True)
    if isinstance(found, TableSurvey):
        console.print(_column_table(found))
    elif path.suffix in TABLES:
        console.print(
            "Read as train.csv of a data set: numbers, and a column label. For a run that reads "
            f"nodes' own tables, {STATE_COLUMNS}",
            soft_wrap=True,
            markup=False,
        )
    if found.findings:
        console.print(_findings_table(found))
    output.mkdir(parents=True, exist_ok=True)
    _write_findings(found, output / "findings.csv")
    written = "findings.csv"
    if thumbnails:
        _picture(thumbnails).save(output / "classes.png")
        written = f"classes.png, {written}"
    console.print(f"Written to {escape(str(output))}: {written}", soft_wrap=True)
    return found


def refusal(found: Survey, *, strict: bool) -> str:
    """Why a run would refuse the data, or why strict people do; else empty."""
    if not found.usable:
        return "nothing in it can be used; see the reasons above"
    if refused := found.of_kind("overflow") + found.of_kind("unit"):
        return f"{refused[0].place} {refused[0].reason}"
    unusable = found.of_kind("unreadable")
    if found.path.suffix in TABLES and unusable:
        rows = counted(len(unusable), "unusable row")
        return f"a run refuses a table with {rows}; drop or fix them"
    if strict and found.findings:
        return f"--strict: {counted(len(found.findings), 'finding')}; fix them, or drop --strict"
    return ""


def _as_read(found: Survey) -> str:
    """What a network sees of the images: the range of their pixels, and what was done to them."""
    darkest, brightest = found.pixel_range
    parts = [f"As read: pixels from {darkest:.3g} to {brightest:.3g} of 1"]
    parts += [
        f"{found.treatments[key]:,} {text}"
        for key, text in TREATMENTS.items()
        if found.treatments[key]
    ]
    if brightest < DIM:
        parts.append("a network hardly sees so little light: brighten them, on all nodes alike")
    return "; ".join(parts)


def _class_table(found: Survey) -> Table:
    table = Table()
    table.add_column("class")
    table.add_column("rows" if found.path.suffix in TABLES else "images", justify="right")
    shown = list(found.counts.items())[:MOST_CLASSES]
    for name, number in shown:
        table.add_row(escape(_short(name)), f"{number:,}")
    if others := list(found.counts.values())[MOST_CLASSES:]:
        table.add_row(f"{len(others)} more", f"{sum(others):,}")
    table.add_section()
    table.add_row("all", f"{found.usable:,}")
    return table


def _column_table(found: TableSurvey) -> Table:
    table = Table()
    table.add_column("column")
    for number in ("values", "missing", "wrong"):
        table.add_column(number, justify="right")
    table.add_column("as a run reads it", overflow="fold")
    for own in found.columns:
        counts = (f"{number:,}" for number in (own.usable, own.missing, own.wrong))
        table.add_row(escape(_short(own.column.name)), *counts, escape(_column_as_read(own)))
    return table


def _column_as_read(own: ColumnSurvey) -> str:
    """What the network sees of a column, and the first values that a run refuses."""
    parts = []
    if own.categories:
        shown = [f"{name} {count:,}" for name, count in own.categories.items()]
        if others := shown[MAX_CATEGORIES:]:
            shown[MAX_CATEGORIES:] = [f"{len(others)} more"]
        parts.append(", ".join(shown))
    elif own.numbers:
        parts.append(_range_of(np.array(own.numbers), own.column.scale))
    if own.examples:
        parts.append(f"wrong: {', '.join(map(_short, own.examples))}")
    return "; ".join(parts)


def _range_of(numbers: NDArray[np.float64], scale: tuple[float, float] | None) -> str:
    low, high = numbers.min(), numbers.max()
    text = f"{low:g} to {high:g}, mean {numbers.mean():g}+-{numbers.std():.3g}; standardised "
    if scale is None:
        return text + "by the rows of all nodes"
    mean, deviation = scale
    low, high = (low - mean) / deviation, (high - mean) / deviation
    return text + f"by {mean:g}+-{deviation:g}: {low:.3g} to {high:.3g}"


def _findings_table(found: Survey) -> Table:
    table = Table()
    table.add_column("what is wrong")
    table.add_column("files" if found.sizes else "samples", justify="right")
    table.add_column(f"the first {MOST_EXAMPLES}", overflow="fold")
    for kind, meaning in MEANINGS.items():
        if findings := found.of_kind(kind):
            examples = (f"{f.place}: {f.reason}" for f in findings[:MOST_EXAMPLES])
            lines = escape("\n".join(examples))
            table.add_row(f"{kind}\n({meaning})", f"{len(findings):,}", lines, end_section=True)
    return table


def _write_findings(found: Survey, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kind", "place", "reason"])
        writer.writerows([f.kind, f.place, f.reason] for f in found.findings)


def _picture(thumbnails: dict[str, list[Image.Image]]) -> Image.Image:
    """One row of images per class, all of them on white squares of the same size."""
    side = max(max(image.size) for images in thumbnails.values() for image in images)
    tiles = [
        np.asarray(ImageOps.pad(image, (side, side), color="white"))
        for images in thumbnails.values()
        for image in images
    ]
    images = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float()
    labels = [row for row, images in enumerate(thumbnails.values()) for _ in images]
    names = [_short(name) for name in thumbnails]
    return contact_sheet(images, torch.tensor(labels), names, limits=(0, 255))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
