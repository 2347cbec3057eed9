"""Surveys a node's own data: counts, and what is unusable.

For headers of images it imports neither torch nor NumPy: a node's supervisor inspects its data too.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from flwr_distill.base.text import counted
from flwr_distill.task.errors import DatasetError
from flwr_distill.task.image_files import (
    Finding,
    Picture,
    Stored,
    Treatment,
    UnusableFileError,
    inspect_image,
    open_image,
    printable,
)
from flwr_distill.task.labels import in_order
from flwr_distill.task.readers import DataReader, data_reader
from flwr_distill.task.text_files import open_rows

MAX_CLASSES_IN_A_LINE = 10
STATE_COLUMNS = (
    'state the columns of the run, as in -c \'private.columns="age,sex:f|m" private.label="ill" '
    'private.classes="no,yes"\''
)
"""How to check a table as a run reads it."""

Watch = Callable[[int, str, Image.Image | None], None]
"""Called for each sample with the number of all (0 if unknown), its class, and its image if any."""


@dataclass
class Survey:
    """Findings in a node's data.

    Parameters
    ----------
    counts : dict[str, int]
        Usable samples of each class, by its name or label.
    sizes : Counter[tuple[int, int]]
        Images of each height and width; empty for a table.
    modes : Counter[str]
        Images of each stored mode, such as ``RGB``, or of an array's type; empty for a table.
    treatments : Counter[Treatment]
        Images of each treatment by their reader, see `task.image_files.Stored`.
    pixel_range : tuple[float, float]
        Darkest and brightest pixel of all decoded images, from 0 to 1; ``(1, 0)`` if there is none.
    findings : list[Finding]
        All problems, in the order of the data.
    """

    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    treatments: Counter[Treatment] = field(default_factory=Counter)
    pixel_range: tuple[float, float] = (1.0, 0.0)
    findings: list[Finding] = field(default_factory=list)
    _first: dict[bytes, tuple[str, str]] = field(default_factory=dict, repr=False)

    @property
    def usable(self) -> int:
        """Number of usable samples."""
        return sum(self.counts.values())

    def of_kind(self, kind: str) -> list[Finding]:
        """Findings of a kind."""
        return [finding for finding in self.findings if finding.kind == kind]

    def size_range(self) -> str:
        """Height x width: the one that all images have, or smallest, largest and most frequent."""
        by_area = sorted(self.sizes, key=lambda size: (size[0] * size[1], size))
        names = [f"{height}x{width}" for height, width in by_area]
        if len(names) < 2:
            return "".join(names)
        usual = names[by_area.index(max(by_area, key=self.sizes.__getitem__))]
        return f"{names[0]} to {names[-1]}, mostly {usual}"

    def in_a_line(self) -> str:
        """Counts, sizes, modes and what is skipped, for a log."""
        classes = [f"{name}: {count}" for name, count in self.counts.items()]
        more = len(classes) - MAX_CLASSES_IN_A_LINE
        listed = ", ".join(classes[:MAX_CLASSES_IN_A_LINE]) + (
            f" and {more} more" if more > 0 else ""
        )
        noun = "class" if len(classes) == 1 else "classes"
        line = f"{counted(self.usable, 'sample')} of {len(classes)} {noun} ({listed})"
        if self.sizes:
            line += f", {self.size_range()}, {'/'.join(sorted(self.modes))}"
        return line + skipped_in_a_line(self.findings)

    def add(self, place: str, label: str, content: bytes | None = None) -> None:
        """Count a sample; `content`, where given, is compared with that of all others."""
        self.counts[label] = self.counts.get(label, 0) + 1
        if content is None:
            return
        digest = hashlib.blake2b(content, digest_size=16).digest()
        first_label, first_place = self._first.setdefault(digest, (label, place))
        if first_label != label:
            reason = f"is the same as {first_place}, in another class; keep the right one"
            self.findings.append(Finding("conflict", place, reason))
        elif first_place != place:
            reason = f"is the same as {first_place}; remove one of them"
            self.findings.append(Finding("duplicate", place, reason))

    def add_image(
        self, place: str, label: str, stored: Stored, content: bytes | None = None
    ) -> None:
        """Count an image; its content, where given, is compared with that of all others."""
        self.sizes[stored.size] += 1
        self.modes[stored.mode] += 1
        self.treatments.update(stored.treatments)
        self.add(place, label, content)

    def add_picture(self, place: str, label: str, picture: Picture) -> None:
        """Count an image, and compare its pixels as read with those of all others."""
        low, high = picture.pixel_range()
        self.pixel_range = min(self.pixel_range[0], low), max(self.pixel_range[1], high)
        pixels = picture.pixels
        if pixels.dtype == "uint8" and len(pixels) == 1:  # the same in colour is a duplicate
            pixels = pixels.repeat(3, axis=0)
        content = f"{pixels.shape}".encode() + pixels.tobytes()
        self.add_image(place, label, picture.stored, content)


def survey(
    path: Path,
    watch: Watch | None = None,
    *,
    decode: bool = True,
    only: Collection[str] | None = None,
) -> Survey:
    """Survey a node's data: images by class of any kind that has a reader, npz or CSV.

    All images are decoded and compared with each other, in one pass. One sample at a time is in
    memory, with a few hundred bytes about each earlier one; an npz is read whole. With
    ``decode=False`` only the headers of image files are read: damage behind a header and duplicates
    are not found. All rows of a table then count, by the column ``label`` if a CSV file has one.
    `task.table_survey` reads a table by the columns of a run. Images of other classes than those in
    `only`, if it is given, are left out.

    Raises
    ------
    DatasetError
        If the data cannot be read at all.
    """
    if reader := data_reader(path):
        return _survey_images(path, reader, decode=decode, watch=watch, only=only)
    if path.suffix in (".csv", ".parquet") and path.is_file() and not decode:
        return Survey(path, counts=_rows_by_label(path))
    if path.suffix == ".npz" and path.is_file():
        return _survey_npz(path, watch, only)
    if path.suffix == ".csv" and path.is_file():
        return _survey_csv(path, watch)
    if path.suffix == ".parquet" and path.is_file():
        raise DatasetError(
            "a table in Parquet is read by its columns", where=path, remedy=STATE_COLUMNS
        )
    raise DatasetError(
        "is neither a folder nor a file of images by class, nor an existing .npz, .csv or "
        ".parquet file",
        where=path,
    )


def _survey_images(
    path: Path,
    reader: DataReader,
    *,
    decode: bool,
    watch: Watch | None = None,
    only: Collection[str] | None = None,
) -> Survey:
    total = reader.number(path)
    result = Survey(path, counts={printable(name): 0 for name in reader.classes(path)})
    for sample in reader.images(path):
        if isinstance(sample, Finding):
            result.findings.append(sample)
            continue
        if only is not None and sample.label not in only:
            continue
        label, shown = printable(sample.label), None
        try:
            if decode:
                picture = open_image(sample.image)
                shown = picture.in_8_bits()
                result.add_picture(sample.place, label, picture)
            else:
                result.add_image(sample.place, label, inspect_image(sample.image))
        except UnusableFileError as error:
            result.findings.append(replace(error.finding, place=sample.place))
        if watch:
            watch(total, label, shown)
    return result


def _rows_by_label(path: Path) -> dict[str, int]:
    """Rows of a table, good or bad, by the column ``label`` of a CSV file if it has one."""
    if path.suffix == ".parquet":
        from flwr_distill.task.readers.arrow import opened

        with opened(path) as table:
            return {"": int(table.metadata.num_rows)}
    with open_rows(path, "CSV file", skipinitialspace=True) as rows:
        header = [name.strip().lower() for name in next(rows, (1, []))[1]]
        place = header.index("label") if "label" in header else len(header)
        return Counter("".join(row[place : place + 1]).strip() for _, row in rows)


def skipped_in_a_line(findings: list[Finding]) -> str:
    """``; skipped 2 files, first ...``, or nothing if all files are usable."""
    skipped = [finding for finding in findings if finding.kind in ("unreadable", "stray")]
    if not skipped:
        return ""
    number = counted(len(skipped), "unusable file")
    return f"; skipped {number}, first {skipped[0].place}: {skipped[0].reason}"


def _survey_npz(path: Path, watch: Watch | None, only: Collection[str] | None) -> Survey:
    import numpy as np

    from flwr_distill.task.datasets.npz import as_pixels, read_array, read_npz_labels
    from flwr_distill.task.datasets.types import DataSpec, RawSamples, check_raw_samples

    images = read_array(path, "images")
    raw = RawSamples(as_pixels(images, path), read_npz_labels(path))
    channels, height, width = raw.images.shape[1:]
    if channels not in (1, 3):
        raise DatasetError(f"images have {channels} channels, need 1 or 3", where=path)
    any_label = DataSpec(path.name, (channels, height, width), np.iinfo(np.int64).max, (), ())
    check_raw_samples(raw, any_label, str(path))
    result = Survey(path, counts={str(label): 0 for label in np.unique(raw.labels)})
    is_scaled = raw.images.dtype != np.uint8
    mode = str(images.dtype) if images.dtype != np.uint8 else {1: "L", 3: "RGB"}[channels]
    stored = Stored((height, width), mode, ("scaled",) if is_scaled else (), channels == 1)
    for number, (pixels, label) in enumerate(zip(raw.images, raw.labels, strict=True)):
        if only is not None and str(label) not in only:
            continue
        picture = Picture(pixels, stored)
        result.add_picture(f"image {number}", str(label), picture)
        if watch:
            watch(len(raw), str(label), picture.in_8_bits())
    return result


def _survey_csv(path: Path, watch: Watch | None) -> Survey:
    import numpy as np

    from flwr_distill.task.datasets.tables import column_problem, feature_names, read_rows

    result = Survey(path)
    try:
        names = feature_names(path)
    except DatasetError as error:
        remedies = filter(None, (error.remedy, STATE_COLUMNS))
        raise DatasetError(
            error.problem, where=error.where, remedy="; or ".join(remedies)
        ) from None
    lowest, highest = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    for row in read_rows(path):
        label = printable(row.label)
        if row.problem:
            result.findings.append(Finding("unreadable", f"line {row.line}", row.problem))
        else:
            values = np.array(row.values)
            lowest, highest = np.minimum(lowest, values), np.maximum(highest, values)
            result.add(f"line {row.line}", label, values.tobytes())
        if watch:
            watch(0, label, None)
    result.counts = {label: result.counts[label] for label in in_order(result.counts)}
    for name, low, high in zip(names, lowest.tolist(), highest.tolist(), strict=True):
        place = printable(f"column {name}")
        if problem := column_problem(low, high):
            result.findings.append(Finding("overflow", place, problem))
        elif low == high and result.usable > 1:
            reason = f"is {low:g} in all rows and says nothing; drop it, here and on all nodes"
            result.findings.append(Finding("constant", place, reason))
    return result
