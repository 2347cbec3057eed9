"""Datasets of image files in folders by part and class, as CINIC-10 is published."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flwr_distill.task.datasets.images import read_image
from flwr_distill.task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples
from flwr_distill.task.image_files import visible
from flwr_distill.task.large_arrays import stacked


@dataclass(frozen=True)
class ClassFolders:
    """Image files below the root: ``<folder>/<part>/<class>/<file>``.

    Classes are labelled in the order of their sorted names.
    """

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Folders of the parts."""
        return tuple(f"{self.folder}/{part}" for part in (*self.train, *self.test))

    def exists(self, root: Path) -> bool:
        """Whether ``root`` has the folders of all parts."""
        return all((root / name).is_dir() for name in self.files)

    def paths(self, root: Path) -> list[Path]:
        """Folders below ``root`` that are read, there or not."""
        return [root / name for name in self.files]

    def read(self, root: Path, train: bool, spec: DataSpec) -> RawSamples:
        """Read the training or the test parts; DatasetError if they do not fit ``spec``."""
        folder = root / self.folder
        parts = [folder / part for part in (self.train if train else self.test)]
        classes = sorted({found.name for part in parts for found in visible(part)})
        if len(classes) != spec.num_classes:
            raise DatasetError(
                f"has {len(classes)} folders of classes in {' and '.join(p.name for p in parts)}, "
                f"need {spec.num_classes}",
                where=folder,
            )
        files = [
            (label, file)
            for part in parts
            for label, name in enumerate(classes)
            for file in visible(part / name)
        ]
        images = stacked(read_image(file, spec) for _, file in files)
        labels = np.array([label for label, _ in files], dtype=np.int64)
        return check_raw_samples(RawSamples(images, labels), spec, str(folder))
