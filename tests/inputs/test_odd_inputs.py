"""Files as people, other systems and bad disks leave them: the right result, or one line.

A line names the file, where there is one its line, and the remedy. Tests run as root too, so a file
in place of a folder and ``/dev/full`` stand for permissions and a full disk.
"""

import io
import json
import os
import re
import struct
import tarfile
import unicodedata
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.fleet.run_config import read_run_config
from flwr_distill.node.settings import load_settings
from flwr_distill.task.datasets import DataSpec, labels_of, load_dataset, load_private_data
from flwr_distill.task.datasets.text import token_ids
from flwr_distill.task.labels import LabelMap
from flwr_distill.task.partition import partition_indices
from flwr_distill.task.settings import TaskSettings

CAFE, SPLIT_CAFE = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
GREY = DataSpec("own", (1, 2, 2), 2, (0.5,), (0.5,))
TABLE = ("a,b,label", "1,2,x", "3,4,y", "5,7,x")
PIXELS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
LABELS = np.array([0, 1, 0])


@dataclass(frozen=True)
class Result:
    """A right result: `read` gives `expected` of what `write` has left in a folder."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    expected: object


@dataclass(frozen=True)
class Refusal:
    """A command that ends with one line with all of `names`, and the remedy."""

    write: Callable[[Path], object]
    command: str
    names: tuple[str, ...]


# How inputs are made.


def file(name: str, content: bytes | str, encoding: str = "utf-8") -> Callable[[Path], object]:
    def write(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))

    return write


def each(*writes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [write(folder) for write in writes]


def lines(*content: str, end: str = "\n") -> str:
    return "".join(f"{line}{end}" for line in content)


def tables(train: bytes | str, test: str = lines(*TABLE), encoding: str = "utf-8"):
    return each(file("train.csv", train, encoding), file("test.csv", test))


def texts(train: bytes | str, encoding: str = "utf-8"):
    return each(file("train.tsv", train, encoding), file("test.tsv", lines("label\ttext", "0\ta")))


def npz(**arrays: object) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **{"images": PIXELS, "labels": LABELS, **arrays})
    return content.getvalue()


def npz_with(*members: tuple[str, bytes]) -> bytes:
    """A good npz with more members."""
    content = io.BytesIO(npz())
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(content, "a") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return content.getvalue()


def patched(content: bytes, local: int, central: int, value: int) -> bytes:
    """Two bytes of the first member's headers replaced: in its own, and in the archive's list."""
    changed, listed = bytearray(content), content.index(b"PK\1\2")
    struct.pack_into("<H", changed, local, value)
    struct.pack_into("<H", changed, listed + central, value)
    return bytes(changed)


def npz_of_many() -> bytes:
    """Says that it has 10^12 images."""
    header = io.BytesIO()
    claim = {"descr": "|u1", "fortran_order": False, "shape": (10**12, 8, 8)}
    np.lib.format.write_array_header_1_0(header, claim)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("images.npy", header.getvalue())
    return content.getvalue()


def npy() -> bytes:
    content = io.BytesIO()
    np.save(content, PIXELS)
    return content.getvalue()


def flipped(content: bytes) -> bytes:
    """With other bytes in the middle of the compressed images."""
    middle = len("images.npy") + 30 + 20
    return content[:middle] + b"\xff\xff\xff" + content[middle + 3 :]


def picture(value: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (2, 2), value).save(content, "png")
    return content.getvalue()


def pictures(*names: str) -> Callable[[Path], object]:
    """Each picture is as bright as its place says."""
    return each(*(file(f"own/{name}", picture(place)) for place, name in enumerate(names)))


def archive(*labels: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for place, label in enumerate(labels):
            for name, data in ((f"{place}.png", picture(place)), (f"{place}.cls", label)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def listed(content: str, *names: str, encoding: str = "utf-8"):
    return each(file("own/list.csv", content, encoding), pictures(*names))


# How they are read.


def own(name: str, *classes: str) -> Callable[[Path], object]:
    """First pixel and label of each image of a node's data."""

    def read(folder):
        raw = load_private_data(folder / name, replace(GREY, labels=LabelMap(classes)))
        return sorted(zip(raw.images[:, 0, 0, 0].tolist(), raw.labels.tolist(), strict=True))

    return read


def table(folder: Path) -> object:
    train = load_dataset("csv", folder).train
    return train.images[:, :, 0, 0].tolist(), train.labels.tolist()


def text(folder: Path) -> object:
    train = load_dataset("ag-news", folder).train
    return train.images[:, 0, 0, :2].tolist(), train.labels.tolist()


def index(folder: Path) -> object:
    labels = np.zeros(4, np.int64)
    file = folder / "split.json"
    return [p.tolist() for p in partition_indices(labels, 2, scheme="index-file", index_file=file)]


GOOD_TABLE = ([[1, 2], [3, 4], [5, 7]], [0, 1, 0])
GOOD_NPZ = [(0, 0), (4, 1), (8, 0)]
TEXTS = lines("label\ttext", "1\tun café", "0\tb")
GOOD_TEXTS = (token_ids(["un café", "b"])[:, 0, 0, :2].tolist(), [1, 0])
SPLIT = json.dumps({"0": [0, 1], "1": [2, 3]})
GOOD_SPLIT = [[0, 1], [2, 3]]
CHECK_NPZ = "data check {}/own.npz --output {}/out"
CHECK = "data check {}/own --output {}/out"
READ_TABLE = "partition iid --dataset csv --nodes 1 --data-root {}"
READ_TEXTS = "partition iid --dataset ag-news --nodes 1 --data-root {}"
READ_SPLIT = "partition index-file --nodes 2 --index-file {}/split.json"

INPUTS: dict[str, Result | Refusal] = {
    # Damaged npz files and odd members.
    "npz: cut off": Refusal(file("own.npz", npz()[:-60]), CHECK_NPZ, ("own.npz",)),
    "npz: empty": Refusal(file("own.npz", b""), CHECK_NPZ, ("own.npz",)),
    "npz: other bytes in a member": Refusal(
        file("own.npz", flipped(npz(images=np.random.default_rng(0).random((9, 9, 9))))),
        CHECK_NPZ,
        ("own.npz",),
    ),
    "npz: encrypted": Refusal(file("own.npz", patched(npz(), 6, 8, 1)), CHECK_NPZ, ("own.npz",)),
    "npz: unknown compression": Refusal(
        file("own.npz", patched(npz(), 8, 10, 98)), CHECK_NPZ, ("own.npz",)
    ),
    "npz: a header of 64 TB": Refusal(file("own.npz", npz_of_many()), CHECK_NPZ, ("own.npz",)),
    "npz: an npy by another name": Refusal(file("own.npz", npy()), CHECK_NPZ, ("own.npz",)),
    "npz: a text called images": Refusal(
        file("own.npz", npz_with(("images", b"see images.npy"))), CHECK_NPZ, ("own.npz", "images")
    ),
    "npz: two arrays called images": Refusal(
        file("own.npz", npz_with(("images.npy", npy()))), CHECK_NPZ, ("own.npz", "images")
    ),
    "npz: pickled labels": Refusal(
        file("own.npz", npz(labels=np.array([0, 1, None]))), CHECK_NPZ, ("own.npz",)
    ),
    "npz: labels are names": Refusal(
        file("own.npz", npz(labels=np.array(["a", "b", "a"]))), CHECK_NPZ, ("own.npz", "labels")
    ),
    "npz: a label is missing": Refusal(
        file("own.npz", npz(labels=LABELS[:2])), CHECK_NPZ, ("own.npz", "labels")
    ),
    "npz: not a number among pixels": Refusal(
        file("own.npz", npz(images=np.where(PIXELS == 3, np.nan, 0))), CHECK_NPZ, ("own.npz",)
    ),
    "npz: images without rows": Refusal(
        file("own.npz", npz(images=PIXELS[:, :0])), CHECK_NPZ, ("own.npz",)
    ),
    "npz: big-endian 16 bits, by columns": Result(
        file("own.npz", npz(images=np.asfortranarray(PIXELS * 257.0).astype(">u2"))),
        lambda folder: [(round(255 * v), label) for v, label in own("own.npz")(folder)],
        GOOD_NPZ,
    ),
    "npz: other members": Result(
        file("own.npz", npz_with(("README.txt", b"hello"), ("__MACOSX/._images.npy", b"\0"))),
        own("own.npz"),
        GOOD_NPZ,
    ),
    "idx: a cut gzip": Refusal(
        each(
            *(
                file(f"MNIST/raw/{part}-ubyte.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x01")
                for part in (
                    *("train-images-idx3", "train-labels-idx1"),
                    *("t10k-images-idx3", "t10k-labels-idx1"),
                )
            )
        ),
        "partition iid --dataset mnist --nodes 1 --data-root {}",
        ("MNIST",),
    ),
    # Tables.
    "csv: byte order mark": Result(tables(lines(*TABLE), encoding="utf-8-sig"), table, GOOD_TABLE),
    "csv: UTF-16": Result(tables(lines(*TABLE), encoding="utf-16"), table, GOOD_TABLE),
    "csv: Windows lines, blank and empty ones": Result(
        tables(lines(*TABLE, ",,", "", "", end="\r\n")), table, GOOD_TABLE
    ),
    "csv: old Mac lines": Result(tables(lines(*TABLE, end="\r")), table, GOOD_TABLE),
    "csv: columns in two Unicode forms": Result(
        tables(lines(f"{SPLIT_CAFE},d,label", *TABLE[1:]), lines(f"{CAFE},d,label", *TABLE[1:])),
        table,
        GOOD_TABLE,
    ),
    "csv: labels in two Unicode forms": Result(
        tables(
            lines("a,label", f"1,{CAFE}", f"2,{SPLIT_CAFE}", "3,z"), lines("a,label", f"1,{CAFE}")
        ),
        table,
        ([[1], [2], [3]], [0, 0, 1]),
    ),
    "csv: an empty label": Refusal(
        tables(lines(*TABLE[:2], "3,4, ", *TABLE[3:])), READ_TABLE, ("train.csv, line 3", "label")
    ),
    "csv: an empty label at a node": Refusal(
        file("own.csv", lines(*TABLE[:2], "3,4,")),
        "data check {}/own.csv --output {}/out",
        ("own.csv",),
    ),
    "csv: Latin-1": Refusal(
        tables(lines(*TABLE, "1,2,é"), encoding="latin-1"),
        READ_TABLE,
        ("train.csv", "line 5", "UTF-8"),
    ),
    "csv: semicolons and decimal commas": Refusal(
        tables(lines("a;b;label", "1,5;2;x")), READ_TABLE, ("train.csv", "commas")
    ),
    "csv: digits in groups": Refusal(
        tables(lines(*TABLE, "1_000,2,x")), READ_TABLE, ("train.csv, line 5", "1_000")
    ),
    "csv: a quote without an end": Refusal(
        tables(lines(*TABLE, '"1,2,x')), READ_TABLE, ("train.csv, line 5",)
    ),
    "csv: zero bytes": Refusal(
        tables(lines(*TABLE, "1\0,2,x")), READ_TABLE, ("train.csv, line 5",)
    ),
    "csv: a cell without end": Refusal(
        tables(lines(*TABLE, f"1,2,{'x' * 200_000}")), READ_TABLE, ("train.csv, line 5",)
    ),
    "csv: two label columns": Refusal(
        tables(lines("label,Label", "x,y")), READ_TABLE, ("train.csv", "label")
    ),
    "csv: empty": Refusal(tables(b""), READ_TABLE, ("train.csv", "label")),
    # Texts.
    "tsv: byte order mark, Windows lines, blank ones": Result(
        texts(TEXTS.replace("\n", "\r\n") + "\r\n\r\n", "utf-8-sig"), text, GOOD_TEXTS
    ),
    "tsv: UTF-16": Result(texts(TEXTS, "utf-16"), text, GOOD_TEXTS),
    "tsv: accents apart": Result(texts(unicodedata.normalize("NFD", TEXTS)), text, GOOD_TEXTS),
    "tsv: an empty label": Refusal(
        texts(lines("label\ttext", "0\ta", "", "\tb")), READ_TEXTS, ("train.tsv, line 4", "label")
    ),
    "tsv: Latin-1": Refusal(texts(TEXTS, "latin-1"), READ_TEXTS, ("train.tsv", "line 2", "UTF-8")),
    "tsv: empty": Refusal(texts(b""), READ_TEXTS, ("train.tsv", "label")),
    # Pictures by class.
    "folders: accents apart, composed in the setting": Result(
        pictures(f"{SPLIT_CAFE}/0.png", "tea/1.png"),
        own(
            "own",
            *TaskSettings.from_run_config({"private.classes": f"tea,{CAFE}"}).private.class_names,
        ),
        [(0, 1), (1, 0)],
    ),
    "folders: a class in two Unicode forms": Result(
        pictures(f"{SPLIT_CAFE}/0.png", f"{CAFE}/1.png", "tea/2.png"),
        own("own"),
        [(0, 0), (1, 0), (2, 1)],
    ),
    "folders: a policy's class with accents apart": Result(
        pictures(f"{CAFE}/0.png", "tea/1.png"),
        lambda folder: labels_of(folder / "own", [SPLIT_CAFE], GREY),
        [0],
    ),
    "folders: a class whose name is not UTF-8": Refusal(
        each(
            pictures("tea/0.png"), lambda folder: os.mkdir(os.fsencode(folder / "own") + b"/\xff")
        ),
        "distill {}/own --output {}/out",
        ("own", "udcff"),
    ),
    "folders: an image whose name is not UTF-8": Result(
        pictures("tea/\udcff.png", "cocoa/1.png"),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "folders: an image cut in its middle": Result(
        each(pictures("tea/0.png", "cocoa/1.png"), file("own/tea/2.png", picture(2)[:40])),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "folders: none": Refusal(file("own/readme.txt", "hello"), CHECK, ("own", "class")),
    "list: UTF-16, Windows lines, blank ones": Result(
        listed(
            lines("file,label", "0.png,b", "", "1.png,a", ",", end="\r\n"),
            *("0.png", "1.png"),
            encoding="utf-16",
        ),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "list: names of files with accents composed, apart on disk": Result(
        listed(lines("file,label", f"{CAFE}.png,b", "1.png,a"), f"{SPLIT_CAFE}.png", "1.png"),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "list: names of files with accents apart, composed on disk": Result(
        listed(lines("file,label", f"{SPLIT_CAFE}.png,b", "1.png,a"), f"{CAFE}.png", "1.png"),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "list: a letter that the composed form does not have": Result(
        listed(lines("file,label", "\u212b.png,b", "1.png,a"), "\u212b.png", "1.png"),
        own("own"),
        [(0, 1), (1, 0)],
    ),
    "list: an empty label": Refusal(
        listed(lines("file,label", "0.png,a", "", "1.png,"), "0.png", "1.png"),
        CHECK,
        ("list.csv, line 4", "label"),
    ),
    "list: Latin-1": Refusal(
        listed(lines("file,label", "0.png,a", "1.png,é"), "0.png", "1.png", encoding="latin-1"),
        CHECK,
        ("list.csv", "line 3", "UTF-8"),
    ),
    "tar: labels with a mark, a line end and accents apart": Result(
        file("own.tar", archive(SPLIT_CAFE.encode("utf-8-sig") + b"\r\n", b"a", CAFE.encode())),
        own("own.tar"),
        [(0, 1), (1, 0), (2, 1)],
    ),
    # Partitions.
    "json: byte order mark": Result(file("split.json", SPLIT, "utf-8-sig"), index, GOOD_SPLIT),
    "json: UTF-16": Result(file("split.json", SPLIT, "utf-16"), index, GOOD_SPLIT),
    "json: a node twice": Refusal(
        file("split.json", '{"0": [0], "1": [1], "0": [2]}'), READ_SPLIT, ("split.json", "'0'")
    ),
    "json: a hundred thousand brackets": Refusal(
        file("split.json", "[" * 100_000), READ_SPLIT, ("split.json",)
    ),
    "json: cut off": Refusal(
        file("split.json", lines('{"0": [0],', '"1": [1')), READ_SPLIT, ("split.json", "line 3")
    ),
    # Settings.
    "toml: byte order mark": Result(
        file("run.toml", "[train]\nlr = 0.5\n", "utf-8-sig"),
        lambda folder: read_run_config(str(folder / "run.toml")),
        {"train.lr": 0.5},
    ),
    "toml: UTF-16, Windows lines": Result(
        file("run.toml", "[train]\r\nlr = 0.5\r\n", "utf-16"),
        lambda folder: read_run_config(str(folder / "run.toml")),
        {"train.lr": 0.5},
    ),
    "toml: Latin-1": Refusal(
        file("run.toml", lines("# fine", 'private.classes = "é,b"'), "latin-1"),
        "run -c {}/run.toml",
        ("run.toml", "line 2", "UTF-8"),
    ),
    "toml: a broken line": Refusal(
        file("run.toml", lines("num-rounds = 2", "[train", "lr = 1")),
        "run -c {}/run.toml",
        ("run.toml", "line 2"),
    ),
    "toml: a folder": Refusal(file("run.toml/x", ""), "run -c {}/run.toml", ("run.toml",)),
    "yaml: UTF-16 with a byte order mark": Result(
        file("node.yaml", "threads: 3\n", "utf-16"),
        lambda folder: load_settings(folder / "node.yaml", {}).threads,
        3,
    ),
    "yaml: Latin-1": Refusal(
        file("node.yaml", lines("threads: 1", "name: é"), "latin-1"),
        "node --config {}/node.yaml",
        ("node.yaml", "line 2", "UTF-8"),
    ),
    "yaml: a policy in Latin-1": Refusal(
        file("policy.yaml", "# é\n", "latin-1"),
        "policy check {}/policy.yaml",
        ("policy.yaml", "line 1", "UTF-8"),
    ),
    # Certificates.
    "certs: a file in place of the folder": Refusal(
        file("certs", ""), "certs init --dir {}/certs", ("certs",)
    ),
    "certs: a damaged authority": Refusal(
        each(
            *(file(f"certs/{name}", b"\xff") for name in ("ca.key", "ca.crt")),
            *(file(f"certs/{name}", b"\xff") for name in ("nodes-ca.key", "nodes-ca.crt")),
            file("certs/issued.json", "[]"),
        ),
        "certs node n --dir {}/certs",
        ("ca.key",),
    ),
    "certs: a cut list of certificates": Refusal(
        file("certs/issued.json", '[{"name": "n'), "certs list --dir {}/certs", ("issued.json",)
    ),
    # Results.
    "results: a file in place of the folder": Refusal(
        each(pictures("a/0.png", "b/1.png"), file("out", "")), CHECK, ("out",)
    ),
    "results: a disk that is full": Refusal(
        lambda folder: None,
        "outbox --state-dir {} --html /dev/full",
        ("No space left on device",),
    ),
}


def command(folder: Path, text: str, **options):
    arguments = [part.replace("{}", str(folder)) for part in text.split()]
    return CliRunner(**options).invoke(app, arguments, env={"COLUMNS": "200"})


def check_refusal(result, names: tuple[str, ...]) -> None:
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("flwr-distill")
    for name in names:
        assert name in line
    assert re.search(r"; \w|\(\w|\bneed", line), "without a remedy"
    assert line.isprintable()


@pytest.mark.parametrize("name", INPUTS)
def test_an_odd_input_gives_the_right_result_or_one_line_with_file_line_and_remedy(name, tmp_path):
    made = INPUTS[name]
    made.write(tmp_path)
    if isinstance(made, Result):
        assert made.read(tmp_path) == made.expected
    else:
        check_refusal(command(tmp_path, made.command), made.names)


def test_there_are_fifty_of_them():
    assert len(INPUTS) >= 50
