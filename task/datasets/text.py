"""Classified texts from TSV files, as token ids.

A word (by scikit-learn's analyzer) gets its MurmurHash3 as id, so nodes need not agree on a
vocabulary or reveal their words. Some words share an id.
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.datasets.types import Dataset, DatasetError, DataSpec, RawSamples, not_found
from flwr_distill.task.image_files import printable
from flwr_distill.task.text_files import composed, open_rows

LENGTH = 64
"""Maximum words per text; nearly all of AG News' descriptions are shorter."""
VOCABULARY = 2**14
"""Number of token ids; 0 is padding."""

_TEXT_COLUMNS = ("text", "sentence")


def text_spec(name: str, num_classes: int) -> DataSpec:
    """Spec of a text dataset."""
    shape = (1, 1, LENGTH)
    return DataSpec(name, shape, num_classes, (0.0,), (1.0,), kind="text", vocabulary=VOCABULARY)


def load_texts(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load ``train.tsv`` and ``test.tsv`` (or ``dev.tsv``, as in SST-2).

    They are in ``<root>/<name>`` (also with ``_`` for ``-``) or ``<root>``. The header has
    ``label`` (numbers from 0) and ``text`` or ``sentence``.
    """
    folders = [root / spec.name, root / spec.name.replace("-", "_"), root]
    for folder in folders:
        tests = [folder / "dev.tsv", folder / "test.tsv"]
        test = next((path for path in tests if path.exists()), None)
        if test is not None and (folder / "train.tsv").exists():
            return Dataset(spec, _read_tsv(folder / "train.tsv", spec), _read_tsv(test, spec))
    places = ", ".join(map(str, folders))
    raise not_found(spec.name, f"train.tsv with test.tsv or dev.tsv in {places}")


def token_ids(texts: list[str]) -> NDArray[np.float32]:
    """Token ids of texts, cut or padded with 0 to `LENGTH`: float32 (n, 1, 1, LENGTH)."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.utils import murmurhash3_32

    words_of = HashingVectorizer(token_pattern=r"(?u)\b\w+\b").build_analyzer()
    ids = np.zeros((len(texts), 1, 1, LENGTH), dtype=np.float32)
    for row, text in enumerate(texts):
        for place, word in enumerate(words_of(composed(text))[:LENGTH]):
            ids[row, 0, 0, place] = 1 + murmurhash3_32(word, positive=True) % (VOCABULARY - 1)
    return ids


def _read_tsv(path: Path, spec: DataSpec) -> RawSamples:
    texts, labels = [], []
    with open_rows(path, "TSV file", delimiter="\t", quoting=csv.QUOTE_NONE) as rows:
        _, names = next(rows, (1, []))
        header = [name.strip() for name in names]
        text = next((header.index(name) for name in _TEXT_COLUMNS if name in header), None)
        if text is None or "label" not in header:
            raise DatasetError(
                f"has the columns {printable(str(header))}, need 'label' and 'text' (or "
                "'sentence'), with tabs between them",
                where=path,
            )
        for line, row in rows:
            label = row[header.index("label")].strip() if len(row) == len(header) else ""
            if not label.isdecimal() or int(label) >= spec.num_classes:
                raise DatasetError(
                    f"need {len(header)} fields and a label of 0 to {spec.num_classes - 1}, got "
                    f"{printable(str(row))}",
                    where=f"{path}, line {line}",
                )
            texts.append(row[text])
            labels.append(int(label))
    if not labels:
        raise DatasetError("has no texts; need at least one", where=path)
    return RawSamples(token_ids(texts), np.array(labels, np.int64))
