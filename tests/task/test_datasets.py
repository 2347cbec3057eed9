"""Data sets by name: files, downloads, plug-ins."""

import bz2
import gzip
import hashlib
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from flwr_distill.task.datasets import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    load_dataset,
    load_private_data,
)
from flwr_distill.task.datasets.types import normalise
from tests.errors import at

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
GREY = DataSpec("grey", (1, 6, 8), 3, (0.25,), (0.5,))
COLOUR = DataSpec("colour", (3, 6, 8), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def _raw(spec, size, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (size, *spec.shape), dtype=np.uint8)
    return RawSamples(images, rng.integers(0, spec.num_classes, size))


def _save_npz(path, images, labels=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"images": images} | ({} if labels is None else {"labels": labels})
    np.savez(path, **arrays)


def _save_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
def test_inputs_are_normalised_channel_by_channel(spec):
    raw = _raw(spec, 5)
    raw.images[0], raw.images[1] = 0, 255
    samples = raw.to_samples(spec)
    assert (samples.inputs.dtype, samples.labels.dtype) == (torch.float32, torch.int64)
    for channel in range(spec.shape[0]):
        expected = (raw.images[:, channel] / 255 - spec.mean[channel]) / spec.std[channel]
        np.testing.assert_allclose(samples.inputs[:, channel].numpy(), expected, atol=1e-6)
    for limit, inputs in zip(spec.pixels, samples.inputs, strict=False):  # of black and of full
        torch.testing.assert_close(limit.expand(spec.shape), inputs)


def test_a_subset_holds_the_chosen_samples_in_order():
    raw = _raw(GREY, 5)
    chosen = raw.subset([4, 1])
    assert len(chosen) == 2
    assert (chosen.images == raw.images[[4, 1]]).all()
    samples = raw.to_samples(GREY).subset(np.array([4, 1]))
    assert len(samples) == 2
    assert torch.equal(samples.inputs, chosen.to_samples(GREY).inputs)
    assert samples.to("cpu").labels.tolist() == raw.labels[[4, 1]].tolist()


def test_digits_are_scikit_learns_split_for_good():
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits")
    assert (len(dataset.train), len(dataset.test)) == (1437, 360)
    ours = np.concatenate([dataset.train.images, dataset.test.images])
    stored = load_digits()
    expected = np.rint(stored.images * 255 / 16).astype(np.uint8)
    assert sorted(i.tobytes() for i in ours) == sorted(i.tobytes() for i in expected)
    assert np.bincount(dataset.test.labels).min() >= 34
    inputs = dataset.train.to_samples(dataset.spec).inputs
    assert abs(inputs.mean()) < 1e-3
    assert abs(inputs.std() - 1) < 1e-3


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
@pytest.mark.parametrize(
    ("name", "sizes", "first_labels"),
    [
        ("mnist", (60_000, 10_000), [5, 0, 4]),
        ("usps", (7_291, 2_007), [6, 5, 4]),
        ("cifar10", (6_000, 1_500), None),
        ("cinic10", (5_000, 1_000), None),
        ("mnist-m", (3_000, 1_000), None),
    ],
)
def test_real_sets_are_read_whole_and_normalised(name, sizes, first_labels):
    dataset = load_dataset(name, SHARED)
    assert (len(dataset.train), len(dataset.test)) == sizes
    assert dataset.train.images.shape[1:] == dataset.spec.shape
    if first_labels:
        assert dataset.train.labels[:3].tolist() == first_labels
    inputs = dataset.test.to_samples(dataset.spec).inputs
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.1
    assert (inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 0.1


def _cinic10(root, classes, parts=("train", "valid", "test")):
    """Two images a class and part, whose pixel is the part's place times 100 plus the label."""
    for place, part in enumerate(parts):
        for label, name in enumerate(classes):
            folder = root / "cinic10" / part / name
            folder.mkdir(parents=True)
            for number in range(2):
                colour = (100 * place + label, number, 0)
                Image.new("RGB", (32, 32), colour).save(folder / f"cifar10-{part}-{number}.png")


def test_cinic10_is_read_from_its_folders_the_validation_part_for_training(tmp_path):
    _cinic10(tmp_path, "jihgfedcba")
    dataset = load_dataset("cinic10", tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (40, 20)
    assert np.bincount(dataset.train.labels).tolist() == [4] * 10
    red = dataset.train.images[:, 0, 0, 0]
    assert {int(value) // 100 for value in red} == {0, 1}
    assert {int(value) // 100 for value in dataset.test.images[:, 0, 0, 0]} == {2}
    assert ((9 - red % 100) == dataset.train.labels).all()  # labels follow the sorted names


def test_cinic10_with_a_class_too_few_or_without_files_is_an_error(tmp_path):
    with pytest.raises(DatasetError, check=at("dataset", value="cinic10")):
        load_dataset("cinic10", tmp_path)
    _cinic10(tmp_path, "abcdefghi")
    with pytest.raises(DatasetError, check=at(tmp_path / "cinic10")):
        load_dataset("cinic10", tmp_path)


@pytest.mark.parametrize("end", ["", ".gz"], ids=["unpacked", "gzipped"])
def test_idx_files_are_read_as_by_torchvision(tmp_path, end):
    rng = np.random.default_rng(0)
    for part, size in (("train", 5), ("t10k", 3)):
        images = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        for own in {"", end}:  # torchvision needs the unpacked ones
            name = "FashionMNIST" if own == end else "theirs/FashionMNIST"
            _save_idx(tmp_path / f"{name}/raw/{part}-images-idx3-ubyte{own}", images)
            _save_idx(tmp_path / f"{name}/raw/{part}-labels-idx1-ubyte{own}", np.arange(size))
    dataset = load_dataset("fashion-mnist", tmp_path)
    for part, ours in ((True, dataset.train), (False, dataset.test)):
        theirs = torchvision.datasets.FashionMNIST(tmp_path / ("theirs" if end else "."), part)
        assert (ours.images[:, 0] == theirs.data.numpy()).all()
        assert (ours.labels == theirs.targets.numpy()).all()


def test_usps_is_read_from_torchvisions_files(tmp_path):
    def line(label, value):  # libsvm text: label from 1, then 256 values in -1..1
        return f"{label} " + " ".join(f"{i + 1}:{value}" for i in range(256))

    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(bz2.compress(f"{line(1, -1)}\n{line(10, 1)}\n".encode()))
    train = load_dataset("usps", tmp_path).train
    assert train.images.shape == (2, 1, 16, 16)
    assert train.images[:, 0, 0, 0].tolist() == [0, 255]
    assert train.labels.tolist() == [0, 9]


def test_svhn_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    from scipy.io import savemat

    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda self: True)
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for part in ("train", "test"):
        labels = np.array([[10], [1], [2], [3]])  # the files write digit 0 as 10
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels})
    dataset = load_dataset("svhn", tmp_path)
    assert (dataset.train.images == images.transpose(3, 2, 0, 1)).all()
    assert dataset.test.labels.tolist() == [0, 1, 2, 3]


def test_cifar_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    from torchvision.datasets import cifar

    monkeypatch.setattr(cifar, "check_integrity", lambda *args: True)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    for part in ("train", "test"):
        (folder / part).write_bytes(pickle.dumps({"data": pixels, "fine_labels": [99, 0]}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["some"] * 100}))
    train = load_dataset("cifar100", tmp_path).train
    assert (train.images == pixels.reshape(2, 3, 32, 32)).all()
    assert train.labels.tolist() == [99, 0]


FLOATS = b"\0\0\x0d\x01\0\0\0\x02\0\0"  # another type of values than the uint8 of idx1-ubyte


@pytest.mark.parametrize("labels", [b"\0\0", b"\0\0\x08", FLOATS])
def test_damaged_files_of_torchvisions_are_named(tmp_path, labels):
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(b"not bz2")
    for part in ("train", "t10k"):
        _save_idx(tmp_path / f"MNIST/raw/{part}-images-idx3-ubyte.gz", np.zeros((2, 28, 28)))
        (tmp_path / f"MNIST/raw/{part}-labels-idx1-ubyte").write_bytes(labels)
    for name in ("usps", "mnist"):
        with pytest.raises(DatasetError, match=f"(?i){name}.*download=true", check=at(tmp_path)):
            load_dataset(name, tmp_path)


def test_download_is_left_to_torchvision_and_only_when_asked(tmp_path, monkeypatch):
    downloads = []

    def refuse(root, *, train, download):
        downloads.append((Path(root).parent, train, download))
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", refuse)
    with pytest.raises(DatasetError, match="was not found"):
        load_dataset("mnist", tmp_path)
    assert downloads == []
    with pytest.raises(DatasetError, match=r"could not be downloaded.*no network"):
        load_dataset("mnist", tmp_path, download=True)
    assert downloads == [(tmp_path, True, True)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["mnist-m", "mnist_m", "."])
def test_npz_files_are_found_under_the_name_or_in_the_root(tmp_path, folder):
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    _save_npz(tmp_path / folder / "train.npz", images, np.arange(4, dtype=np.int32))
    _save_npz(tmp_path / folder / "test.npz", images[:2], np.arange(2))
    dataset = load_dataset("mnist-m", tmp_path)
    assert (dataset.train.images == images.transpose(0, 3, 1, 2)).all()
    assert dataset.train.labels.dtype == np.int64
    assert len(dataset.test) == 2


def test_the_default_root_is_the_environments_else_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_DISTILL_DATA_ROOT", str(tmp_path / "elsewhere"))
    with pytest.raises(DatasetError, match="elsewhere"):
        load_dataset("mnist-m")
    monkeypatch.delenv("FLWR_DISTILL_DATA_ROOT")
    with pytest.raises(DatasetError, match=r"tried data/mnist-m/train.npz"):
        load_dataset("mnist-m")


def test_a_missing_set_is_an_error_with_every_place_and_the_remedy(tmp_path):
    with pytest.raises(DatasetError, check=at("dataset", value="fashion-mnist")) as error:
        load_dataset("fashion-mnist", tmp_path)
    for place in (
        *("fashion-mnist/train.npz", "fashion_mnist/train.npz", "train.npz"),
        "FashionMNIST/raw/train-images-idx3-ubyte",
    ):
        assert str(tmp_path / place) in error.value.problem
    assert "data-root" in error.value.remedy
    assert "download=true" in error.value.remedy


IMAGES = np.zeros((2, 6, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "need"),
    [
        ({"images": IMAGES}, r"\['images'\], need .*'labels'"),
        ({"images": IMAGES + 9.0, "labels": [0, 0]}, "float pixels from 9"),
        ({"images": np.zeros(6), "labels": [0] * 6}, r"need \(n, H, W\)"),
        ({"images": np.zeros((2, 6, 8, 2), np.uint8), "labels": [0, 0]}, r"\(n, 1, 6, 8\)"),
        ({"images": IMAGES, "labels": [0, 0, 0]}, "each of the 2"),
        ({"images": IMAGES, "labels": [0.0, 0.0]}, "need integers"),
        ({"images": IMAGES[:0], "labels": np.zeros(0, int)}, "no images"),
        ({"images": IMAGES, "labels": [0, 3]}, "from 0 to 3.*labels 0 to 2"),
        ({"images": IMAGES, "labels": [0, -1]}, "from -1"),
    ],
)
def test_a_bad_npz_is_an_error_with_file_and_need(tmp_path, arrays, need):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DatasetError, match=need, check=at(tmp_path / "own.npz")):
        load_private_data(tmp_path / "own.npz", GREY)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n"
        "from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples\n"
        "def tiny(root, download, top=1):\n"
        "    spec = DataSpec('tiny', (1, 2, 2), 2, (.5,), (.5,))\n"
        "    part = RawSamples(np.zeros((2, 1, 2, 2), np.uint8), np.array([0, top]))\n"
        "    return Dataset(spec, part, part)\n"
        "def beyond(root, download):\n"
        "    return tiny(root, download, top=2)\n"
        "def nothing(root, download):\n"
        "    return root, download\n"
        "def texts(root, download, last=9):\n"
        "    spec = DataSpec('t', (1, 1, 3), 2, (0.,), (1.,), kind='text', vocabulary=10)\n"
        "    ids = np.array([[[[1, last, 0]]]], np.float32)\n"
        "    part = RawSamples(ids, np.array([1]))\n"
        "    return Dataset(spec, part, part)\n"
        "def beyond_vocabulary(root, download):\n"
        "    return texts(root, download, last=10)\n"
        "def half_a_word(root, download):\n"
        "    return texts(root, download, last=1.5)\n"
        "def table(root, download, value=-7.5):\n"
        "    spec = DataSpec('t', (2, 1, 1), 2, (0., 0.), (1., 1.), kind='table')\n"
        "    values = np.array([[[[value]], [[300.0]]]])\n"
        "    part = RawSamples(values, np.array([1]))\n"
        "    return Dataset(spec, part, part)\n"
        "def empty_field(root, download):\n"
        "    return table(root, download, value=np.nan)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_data"
    sys.modules.pop("my_data", None)


def test_a_function_from_another_package_gives_the_data(plugin):
    dataset = load_dataset(f"{plugin}:tiny")
    assert isinstance(dataset, Dataset)
    assert dataset.spec.name == "tiny"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_data:nothing", "returned a tuple"),
        ("my_data:number", "need a function"),
        ("my_data:missing", "has no attribute 'missing'"),
        ("no_such_package:load", "cannot be imported"),
        ("imagenet", "is unknown here .*digits, mnist"),
    ],
)
def test_a_bad_name_or_plug_in_is_an_error(plugin, name, problem):
    with pytest.raises(DatasetError, match=problem, check=at("dataset", value=name)):
        load_dataset(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("beyond", "from 0 to 2"),
        ("beyond_vocabulary", "from 0 to 10, need whole numbers from 0 to 9"),
        ("half_a_word", "from 0 to 1.5, need whole numbers"),
        ("empty_field", "not finite"),
    ],
)
def test_samples_of_a_plug_in_must_fit_its_spec(plugin, name, problem):
    with pytest.raises(DatasetError, match=problem, check=at(f"my_data:{name} (train)")):
        load_dataset(f"my_data:{name}")


def test_a_function_from_another_package_gives_texts_and_tables(plugin):
    texts, table = load_dataset(f"{plugin}:texts"), load_dataset(f"{plugin}:table")
    assert normalise(texts.train.images, texts.spec).tolist() == [[[[1, 9, 0]]]]
    assert normalise(table.train.images, table.spec).tolist() == [[[[-7.5]], [[300]]]]


NODES = 3
PARTS = {"train": 200, "t10k": 10}
PAUSE = 0.2
"""Seconds between the halves of a file."""


def idx(values: np.ndarray) -> bytes:
    sizes = np.array(values.shape, ">i4").tobytes()
    return gzip.compress(b"\0\0\x08" + bytes([values.ndim]) + sizes + values.tobytes())


@pytest.fixture
def mirror(monkeypatch):
    """A slow mirror of a little MNIST on this machine; gives an event, set in its last file."""
    draws = np.random.default_rng(0)
    files, in_last_file = {}, threading.Event()
    for part, number in PARTS.items():
        images = draws.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        files[f"{part}-images-idx3-ubyte.gz"] = idx(images)
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(number, dtype=np.uint8) % 10)

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            content = files[self.path.strip("/")]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            if self.path.strip("/") == list(files)[-1]:
                in_last_file.set()
            time.sleep(PAUSE)
            self.wfile.write(content[half:])

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mnist = torchvision.datasets.MNIST
    monkeypatch.setattr(mnist, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    known = [(name, hashlib.md5(data).hexdigest()) for name, data in files.items()]
    monkeypatch.setattr(mnist, "resources", known)
    yield in_last_file
    server.shutdown()
    server.server_close()
    thread.join()


def test_three_nodes_that_download_into_one_folder_read_whole_files(mirror, tmp_path):
    def node(number):
        if number == NODES - 1:  # it comes when the others have part of every file
            assert mirror.wait(20)
            time.sleep(PAUSE / 2)
        return load_dataset("mnist", tmp_path, download=True).train

    with ThreadPoolExecutor(NODES) as nodes:
        first, *others = nodes.map(node, range(NODES))
    assert len(first) == PARTS["train"]
    for other in others:
        assert np.array_equal(other.images, first.images)
        assert np.array_equal(other.labels, first.labels)
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]  # nothing is left of downloads
