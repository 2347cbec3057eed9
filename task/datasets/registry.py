"""Datasets by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from flwr_distill.task.datasets import corruptions
from flwr_distill.task.datasets.class_folders import ClassFolders
from flwr_distill.task.datasets.npz import read_npz
from flwr_distill.task.datasets.tables import load_tables
from flwr_distill.task.datasets.text import load_texts, text_spec
from flwr_distill.task.datasets.torchvision_files import IdxFiles, TorchvisionFiles
from flwr_distill.task.datasets.types import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    check_raw_samples,
    not_found,
)
from flwr_distill.task.plugin import PluginError, call_plugin, import_object, plugged_in
from flwr_distill.task.settings import Change

Loader = Callable[[DataSpec, Path, bool], Dataset]
Layout = TorchvisionFiles | ClassFolders

_ENDS = (".npz", ".csv", ".tsv")
_SPLIT_SEED = 0


@dataclass(frozen=True)
class _Entry:
    spec: DataSpec
    load: Loader
    layout: Layout | None = None


def load_dataset(name: str, root: str | Path | None = None, *, download: bool = False) -> Dataset:
    """Load a dataset by name.

    Parameters
    ----------
    name : str
        ``digits`` (embedded), ``mnist``, ``fashion-mnist``, ``usps``, ``cifar10``, ``cifar100``,
        ``cinic10``, ``svhn``, ``mnist-m``, ``ag-news``, ``sst-2``, ``csv`` (a table of numbers with
        a label column: see `load_tables`), ``cifar10-c/contrast-3`` and the like (see
        `corruptions`), or ``"my_pkg.mod:fn"``, where ``fn(root, download)`` returns a `Dataset`.
    root : str or Path, optional (default: `data_root()`)
        Folder of the files. Tried in this order: ``<root>/<name>/train.npz`` and ``test.npz`` (also
        with ``_`` for ``-``), torchvision's layout below ``<root>`` (of ``cinic10`` the folders
        ``train``, ``valid`` and ``test`` of classes in ``<root>/cinic10``), ``<root>/train.npz``
        and ``test.npz``.
    download : bool (default: False)
        Let torchvision download missing files.

    Raises
    ------
    DatasetError
        If the name is unknown, or files are missing, damaged or do not fit.
    """
    folder = data_root() if root is None else Path(root)
    if name.startswith(corruptions.PREFIX):
        if all(file.exists() for file in corruptions.published_files(name, folder)):
            return corruptions.read_published(name, folder, _ENTRIES["cifar10"].spec)
        clean = load_dataset("cifar10", folder, download=download)
        return corruptions.corrupted(clean, name)
    if name not in _ENTRIES:
        return _load_plugin(name, folder, download)
    entry = _ENTRIES[name]
    return entry.load(entry.spec, folder, download)


def dataset_files(name: str, root: str | Path | None = None) -> list[Path]:
    """Paths that `load_dataset` may read, existing or not; a plug-in may read all of root."""
    folder = data_root() if root is None else Path(root)
    if name.startswith(corruptions.PREFIX):
        return [*corruptions.published_files(name, folder), *dataset_files("cifar10", folder)]
    if name not in _ENTRIES:
        return [folder]
    if _ENTRIES[name].load is load_digits:  # they come with a package
        return []
    layout = _ENTRIES[name].layout
    return [
        *(folder / own for own in folder_names(name)),
        *(folder / f"{part}{end}" for part in ("train", "dev", "test") for end in _ENDS),
        *(layout.paths(folder) if layout else ()),
    ]


def dataset_names() -> list[str]:
    """Names that `load_dataset` knows without plug-ins."""
    return list(_ENTRIES)


def data_root() -> Path:
    """Default data folder: ``$FLWR_DISTILL_DATA_ROOT``, else ``data/`` in the working directory."""
    return Path(os.environ.get("FLWR_DISTILL_DATA_ROOT", "data"))


def folder_names(name: str) -> list[str]:
    """Folder names of a dataset: its name with ``-`` and with ``_``."""
    return sorted({name, name.replace("-", "_")})


def _load_plugin(name: str, root: Path, download: bool) -> Dataset:
    try:
        path = name if ":" in name else plugged_in("datasets", name)
        if path is None:
            raise _refused(
                name,
                "is unknown here",
                f"choose one of {', '.join(_ENTRIES)}, {corruptions.PREFIX}contrast-3 and the "
                "like, name your own as 'package.module:function', or install its package",
            )
        dataset = call_plugin(import_object(path), path, Dataset, root, download)
    except PluginError as error:
        raise _refused(name, error.problem, error.remedy) from error
    check_raw_samples(dataset.train, dataset.spec, f"{name} (train)")
    check_raw_samples(dataset.test, dataset.spec, f"{name} (test)")
    return dataset


def _refused(name: str, problem: str, remedy: str) -> DatasetError:
    return DatasetError(problem, where="dataset", value=name, remedy=remedy)


def _load_files(spec: DataSpec, root: Path, download: bool, *, layout: Layout | None) -> Dataset:
    folders = [root / folder for folder in folder_names(spec.name)]
    for folder in folders:
        if _has_npz(folder):
            return _read_npz_pair(folder, spec)
    if isinstance(layout, TorchvisionFiles) and download and not layout.exists(root):
        layout.download(root)
    if layout is not None and layout.exists(root):
        train, test = (layout.read(root, part, spec) for part in (True, False))
        return Dataset(spec, train, test)
    if _has_npz(root):
        return _read_npz_pair(root, spec)
    places = [f"{folder / 'train.npz'} and test.npz" for folder in [*folders, root]]
    places += [" and ".join(str(root / file) for file in layout.files)] if layout else []
    hint = ", or download=true" if isinstance(layout, TorchvisionFiles) else ""
    raise not_found(spec.name, "; ".join(places), hint)


def _has_npz(folder: Path) -> bool:
    return (folder / "train.npz").exists() and (folder / "test.npz").exists()


def _read_npz_pair(folder: Path, spec: DataSpec) -> Dataset:
    return Dataset(spec, read_npz(folder / "train.npz", spec), read_npz(folder / "test.npz", spec))


def load_digits(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load scikit-learn's 1,797 digits, which need no download: 1,437 for training, 360 to test.

    The split is fixed and stratified by class: every fifth image of the shuffled classes is for
    testing. Pixels 0 to 16 become 0 to 255.
    """
    # Read the file without importing scikit-learn, which takes as long as importing torch.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn, which is not installed")
    stored = np.loadtxt(
        Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
    )
    images = np.rint(stored[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = stored[:, -1].astype(np.int64)
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    is_test = np.arange(len(labels)) % 5 == 0
    samples = RawSamples(images, labels)
    train, test = (samples.subset(np.sort(by_class[part])) for part in (~is_test, is_test))
    return Dataset(spec, train, test)


def _images(
    name: str,
    shape: tuple[int, int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    changes: tuple[Change, ...],
    layout: Layout | None = None,
    num_classes: int = 10,
) -> _Entry:
    spec = DataSpec(name, shape, num_classes, mean, std, safe_changes=changes)
    return _Entry(spec, partial(_load_files, layout=layout), layout)


_DIGITS: tuple[Change, ...] = ("shift", "scale", "rotate", "shear")
_THINGS: tuple[Change, ...] = ("shift", "scale", "rotate", "flip", "cutout")
_CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
_CINIC10 = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
_SVHN = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
_MNIST_M = (0.4603, 0.4645, 0.4095), (0.2528, 0.2382, 0.2582)
"""Of the training pixels; those of CIFAR, CINIC and SVHN are the values in common use."""
_USPS_FILES = TorchvisionFiles("USPS", ("usps.bz2", "usps.t.bz2"))
_CIFAR10_FILES = TorchvisionFiles("CIFAR10", ("cifar-10-batches-py",))
_CIFAR100_FILES = TorchvisionFiles("CIFAR100", ("cifar-100-python",))
_CINIC10_FILES = ClassFolders("cinic10", train=("train", "valid"), test=("test",))
_SVHN_FILES = TorchvisionFiles(
    "SVHN", ("train_32x32.mat", "test_32x32.mat"), labels="labels", split_by_name=True
)
_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)

_ENTRIES = {
    entry.spec.name: entry
    for entry in (
        _Entry(
            DataSpec("digits", (1, 8, 8), 10, (0.3054,), (0.3760,), safe_changes=_DIGITS),
            load_digits,
        ),
        _images("mnist", _GREY, (0.1307,), (0.3081,), _DIGITS, IdxFiles("MNIST")),
        _images("fashion-mnist", _GREY, (0.2860,), (0.3530,), _THINGS, IdxFiles("FashionMNIST")),
        _images("usps", (1, 16, 16), (0.2539,), (0.3842,), _DIGITS, _USPS_FILES),
        _images("cifar10", _COLOUR, *_CIFAR10, _THINGS, _CIFAR10_FILES),
        _images("cifar100", _COLOUR, *_CIFAR100, _THINGS, _CIFAR100_FILES, num_classes=100),
        _images("cinic10", _COLOUR, *_CINIC10, _THINGS, _CINIC10_FILES),
        _images("svhn", _COLOUR, *_SVHN, _DIGITS, _SVHN_FILES),
        _images("mnist-m", _COLOUR, *_MNIST_M, _DIGITS),
        _Entry(text_spec("ag-news", num_classes=4), load_texts),
        _Entry(text_spec("sst-2", num_classes=2), load_texts),
        _Entry(DataSpec("csv", (1, 1, 1), 2, (0.0,), (1.0,), kind="table"), load_tables),
    )
}
