"""The work of `flwr-distill data check`: survey the data, show and write the findings."""

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
MAX_CLASSES = 100
"""Classes in the table and the picture: the first ones."""
MAX_CATEGORIES = 20
MAX_EXAMPLES = 5
MAX_NAME = 30
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


def check_data(
    path: Path, output: Path, console: Console, private: PrivateSettings | None = None
) -> Survey:
    """Show the data at `path`, and write ``classes.png`` and ``findings.csv`` to `output`.

    With `private`, `path` is read as a table, as in a run with these settings.
    """
    thumbnails: defaultdict[str, list[Image.Image]] = defaultdict(list)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def watch(total: int, label: str, image: Image.Image | None) -> None:
            bar.update(task, advance=1, total=total or None)
            known = label in thumbnails or len(thumbnails) < MAX_CLASSES
            if image is not None and known and len(thumbnails[label]) < COLUMNS:
                image = image.convert("RGB")
                image.thumbnail((SIDE, SIDE))
                thumbnails[label].append(image)

        results: Survey
        if private and private.table:
            results = survey_table(path, private.table, private.class_names, watch)
        else:
            results = survey(path, watch)
    console.print(_class_table(results))
    if results.sizes:
        modes = ", ".join(f"{mode} {number:,}" for mode, number in results.modes.most_common())
        console.print(f"Height x width {results.size_range()}; modes: {modes}", soft_wrap=True)
        console.print(_as_read(results), soft_wrap=True)
    if isinstance(results, TableSurvey):
        console.print(_column_table(results))
    elif path.suffix in TABLES:
        console.print(
            "Read as train.csv of a data set: numbers, and a column label. For a run that reads "
            f"nodes' own tables, {STATE_COLUMNS}",
            soft_wrap=True,
            markup=False,
        )
    if results.findings:
        console.print(_findings_table(results))
    output.mkdir(parents=True, exist_ok=True)
    _write_findings(results, output / "findings.csv")
    written = "findings.csv"
    if thumbnails:
        _picture(thumbnails).save(output / "classes.png")
        written = f"classes.png, {written}"
    console.print(f"Written to {escape(str(output))}: {written}", soft_wrap=True)
    return results


def refusal(results: Survey, *, strict: bool) -> str:
    """Why a run, or --strict, would refuse the data; else empty."""
    if not results.usable:
        return "it has no usable sample; see the reasons above"
    if refused := results.of_kind("overflow") + results.of_kind("unit"):
        return f"{refused[0].place} {refused[0].reason}"
    unusable = results.of_kind("unreadable")
    if results.path.suffix in TABLES and unusable:
        rows = counted(len(unusable), "unusable row")
        return f"a run refuses a table with {rows}; drop or fix them"
    if strict and results.findings:
        return f"--strict: {counted(len(results.findings), 'finding')}; fix them, or drop --strict"
    return ""


def _as_read(results: Survey) -> str:
    """The range of the pixels, and how the images were changed when they were read."""
    darkest, brightest = results.pixel_range
    parts = [f"As read: pixels from {darkest:.3g} to {brightest:.3g} of 1"]
    parts += [
        f"{results.treatments[key]:,} {text}"
        for key, text in TREATMENTS.items()
        if results.treatments[key]
    ]
    if brightest < DIM:
        parts.append("too dark for a network: brighten them, on all nodes alike")
    return "; ".join(parts)


def _class_table(results: Survey) -> Table:
    table = Table()
    table.add_column("class")
    table.add_column("rows" if results.path.suffix in TABLES else "images", justify="right")
    shown = list(results.counts.items())[:MAX_CLASSES]
    for name, number in shown:
        table.add_row(escape(_short(name)), f"{number:,}")
    if others := list(results.counts.values())[MAX_CLASSES:]:
        table.add_row(f"{len(others)} more", f"{sum(others):,}")
    table.add_section()
    table.add_row("all", f"{results.usable:,}")
    return table


def _column_table(results: TableSurvey) -> Table:
    table = Table()
    table.add_column("column")
    for number in ("values", "missing", "wrong"):
        table.add_column(number, justify="right")
    table.add_column("as a run reads it", overflow="fold")
    for own in results.columns:
        counts = (f"{number:,}" for number in (own.usable, own.missing, own.wrong))
        table.add_row(escape(_short(own.column.name)), *counts, escape(_column_as_read(own)))
    return table


def _column_as_read(own: ColumnSurvey) -> str:
    """A column as the network sees it, and the first values that a run refuses."""
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


def _findings_table(results: Survey) -> Table:
    table = Table()
    table.add_column("what is wrong")
    table.add_column("files" if results.sizes else "samples", justify="right")
    table.add_column(f"the first {MAX_EXAMPLES}", overflow="fold")
    for kind, meaning in MEANINGS.items():
        if findings := results.of_kind(kind):
            examples = (f"{f.place}: {f.reason}" for f in findings[:MAX_EXAMPLES])
            lines = escape("\n".join(examples))
            table.add_row(f"{kind}\n({meaning})", f"{len(findings):,}", lines, end_section=True)
    return table


def _write_findings(results: Survey, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kind", "place", "reason"])
        writer.writerows([f.kind, f.place, f.reason] for f in results.findings)


def _picture(thumbnails: dict[str, list[Image.Image]]) -> Image.Image:
    """One row of images per class, on white squares of the same size."""
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
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
