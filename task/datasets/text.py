"""Classified texts from TSV files, as token ids that need no vocabulary to be agreed on.

Words are those of scikit-learn's analyzer; a word's id is its MurmurHash3, so that all nodes give
it the same one without telling each other which words they hold. Some words share an id.
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from task.datasets.types import Dataset, DatasetError, DataSpec, RawSamples

LENGTH = 64
"""Words of a text that are kept; of AG News' descriptions nearly all have fewer."""
VOCABULARY = 2**14
"""Token ids: 0 where there is no word, and 1 to ``VOCABULARY - 1``."""

_TEXT_COLUMNS = ("text", "sentence")


def text_spec(name: str, num_classes: int) -> DataSpec:
    """What a model for texts must fit."""
    shape = (1, 1, LENGTH)
    return DataSpec(name, shape, num_classes, (0.0,), (1.0,), kind="text", vocabulary=VOCABULARY)


def load_texts(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load ``train.tsv`` and ``test.tsv`` (or ``dev.tsv``, as SST-2 has it).

    Sought in ``<root>/<name>`` (also with ``_`` for ``-``), then in ``<root>``. The first line
    names the columns: ``label`` (numbers from 0) and ``text`` or ``sentence``. ``download`` is not
    offered.

    Raises
    ------
    DatasetError
        If files are missing or do not fit.
    """
    folders = [root / spec.name, root / spec.name.replace("-", "_"), root]
    for folder in folders:
        tests = [folder / "dev.tsv", folder / "test.tsv"]
        test = next((path for path in tests if path.exists()), None)
        if test is not None and (folder / "train.tsv").exists():
            return Dataset(spec, _read_tsv(folder / "train.tsv", spec), _read_tsv(test, spec))
    raise DatasetError(
        f"dataset={spec.name!r} was not found; sought train.tsv with test.tsv or dev.tsv in "
        f"{', '.join(map(str, folders))}. Remedy: set data-root=... to the folder that holds it"
    )


def token_ids(texts: list[str]) -> NDArray[np.float32]:
    """Token ids of texts, cut or filled with 0 to `LENGTH`: whole numbers, float32 (n, 1, 1, L)."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.utils import murmurhash3_32

    words_of = HashingVectorizer(token_pattern=r"(?u)\b\w+\b").build_analyzer()
    ids = np.zeros((len(texts), 1, 1, LENGTH), dtype=np.float32)
    for row, text in enumerate(texts):
        for place, word in enumerate(words_of(text)[:LENGTH]):
            ids[row, 0, 0, place] = 1 + murmurhash3_32(word, positive=True) % (VOCABULARY - 1)
    return ids


def _read_tsv(path: Path, spec: DataSpec) -> RawSamples:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path}: not a readable TSV file ({error})") from error
    text_column = next((header.index(name) for name in _TEXT_COLUMNS if name in header), None)
    if text_column is None or "label" not in header:
        raise DatasetError(
            f"{path}: has the columns {header}, need 'label' and 'text' (or 'sentence')"
        )
    label_column = header.index("label")
    labels = []
    for line, row in enumerate(rows, 2):
        label = row[label_column] if len(row) == len(header) else ""
        if not label.isdecimal() or int(label) >= spec.num_classes:
            raise DatasetError(
                f"{path}, line {line}: need {len(header)} fields and a label of 0 to "
                f"{spec.num_classes - 1}, got {row}"
            )
        labels.append(int(label))
    if not labels:
        raise DatasetError(f"{path}: holds no texts, need at least one")
    return RawSamples(token_ids([row[text_column] for row in rows]), np.array(labels, np.int64))
