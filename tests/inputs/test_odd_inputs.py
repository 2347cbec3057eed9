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
TWO = [(0, 1), (1, 0)]
"""Of two images, the first is of the second class."""
CLASSES = TaskSettings.from_run_config({"private.classes": f"tea,{CAFE}"}).private.class_names
CHECK_NPZ = "data check {}/own.npz --output {}/out"
CHECK = "data check {}/own --output {}/out"
READ_TABLE = "partition iid --dataset csv --nodes 1 --data-root {}"
READ_TEXTS = "partition iid --dataset ag-news --nodes 1 --data-root {}"
READ_SPLIT = "partition index-file --nodes 2 --index-file {}/split.json"


def bad_npz(content: bytes, *names: str) -> Refusal:
    return Refusal(file("own.npz", content), CHECK_NPZ, ("own.npz", *names))


def bad_table(train: bytes | str, *names: str, encoding: str = "utf-8") -> Refusal:
    return Refusal(tables(train, encoding=encoding), READ_TABLE, names)


def good_table(train: str, encoding: str = "utf-8") -> Result:
    return Result(tables(train, encoding=encoding), table, GOOD_TABLE)


def good_texts(train: str, encoding: str = "utf-8") -> Result:
    return Result(texts(train, encoding), text, GOOD_TEXTS)


def bad_split(content: str, *names: str) -> Refusal:
    return Refusal(file("split.json", content), READ_SPLIT, ("split.json", *names))


def good_list(*content: str, names: tuple[str, str], end: str = "\n", encoding: str = "utf-8"):
    return Result(
        listed(lines("file,label", *content, end=end), *names, encoding=encoding), own("own"), TWO
    )


def bad_list(*content: str, names: tuple[str, ...], encoding: str = "utf-8") -> Refusal:
    rows = lines("file,label", "0.png,a", *content)
    return Refusal(listed(rows, "0.png", "1.png", encoding=encoding), CHECK, names)


def good_run_config(content: str, encoding: str) -> Result:
    return Result(
        file("run.toml", content, encoding),
        lambda folder: read_run_config(str(folder / "run.toml")),
        {"train.lr": 0.5},
    )


def bad_run_config(name: str, content: str, *names: str, encoding: str = "utf-8") -> Refusal:
    return Refusal(file(name, content, encoding), "run -c {}/run.toml", ("run.toml", *names))


RANDOM = np.random.default_rng(0).random((9, 9, 9))
IDX = [f"{kind}-{part}" for kind in ("train", "t10k") for part in ("images-idx3", "labels-idx1")]
KEYS = [f"{authority}.{end}" for authority in ("ca", "nodes-ca") for end in ("key", "crt")]

INPUTS: dict[str, Result | Refusal] = {
    # Damaged npz files and odd members.
    "npz: cut off": bad_npz(npz()[:-60]),
    "npz: empty": bad_npz(b""),
    "npz: other bytes in a member": bad_npz(flipped(npz(images=RANDOM))),
    "npz: encrypted": bad_npz(patched(npz(), 6, 8, 1)),
    "npz: unknown compression": bad_npz(patched(npz(), 8, 10, 98)),
    "npz: a header of 64 TB": bad_npz(npz_of_many()),
    "npz: an npy by another name": bad_npz(npy()),
    "npz: a text called images": bad_npz(npz_with(("images", b"see images.npy")), "images"),
    "npz: two arrays called images": bad_npz(npz_with(("images.npy", npy())), "images"),
    "npz: pickled labels": bad_npz(npz(labels=np.array([0, 1, None]))),
    "npz: labels are names": bad_npz(npz(labels=np.array(["a", "b", "a"])), "labels"),
    "npz: a label is missing": bad_npz(npz(labels=LABELS[:2]), "labels"),
    "npz: not a number among pixels": bad_npz(npz(images=np.where(PIXELS == 3, np.nan, 0))),
    "npz: images without rows": bad_npz(npz(images=PIXELS[:, :0])),
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
        each(*(file(f"MNIST/raw/{name}-ubyte.gz", b"\x1f\x8b\x08\0\0") for name in IDX)),
        "partition iid --dataset mnist --nodes 1 --data-root {}",
        ("MNIST",),
    ),
    # Tables.
    "csv: byte order mark": good_table(lines(*TABLE), "utf-8-sig"),
    "csv: UTF-16": good_table(lines(*TABLE), "utf-16"),
    "csv: Windows lines, blank and empty ones": good_table(lines(*TABLE, ",,", "", end="\r\n")),
    "csv: old Mac lines": good_table(lines(*TABLE, end="\r")),
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
    "csv: an empty label": bad_table(lines(*TABLE[:2], "3,4, "), "train.csv, line 3", "label"),
    "csv: an empty label at a node": Refusal(
        file("own.csv", lines(*TABLE[:2], "3,4,")),
        "data check {}/own.csv --output {}/out",
        ("own.csv",),
    ),
    "csv: Latin-1": bad_table(
        lines(*TABLE, "1,2,é"), "train.csv", "line 5", "UTF-8", encoding="latin-1"
    ),
    "csv: semicolons and decimal commas": bad_table(
        lines("a;b;label", "1,5;2;x"), "train.csv", "commas"
    ),
    "csv: digits in groups": bad_table(
        lines(*TABLE, "1_000,2,x"), "train.csv, line 5", "a is no number"
    ),
    "csv: a quote without an end": bad_table(lines(*TABLE, '"1,2,x'), "train.csv, line 5"),
    "csv: zero bytes": bad_table(lines(*TABLE, "1\0,2,x"), "train.csv, line 5"),
    "csv: a cell without end": bad_table(lines(*TABLE, f"1,2,{'x' * 200_000}"), "csv, line 5"),
    "csv: two label columns": bad_table(lines("label,Label", "x,y"), "train.csv", "label"),
    "csv: empty": bad_table(b"", "train.csv", "label"),
    # Texts.
    "tsv: byte order mark, Windows lines, blank ones": good_texts(
        TEXTS.replace("\n", "\r\n") + "\r\n\r\n", "utf-8-sig"
    ),
    "tsv: UTF-16": good_texts(TEXTS, "utf-16"),
    "tsv: accents apart": good_texts(unicodedata.normalize("NFD", TEXTS)),
    "tsv: an empty label": Refusal(
        texts(lines("label\ttext", "0\ta", "", "\tb")), READ_TEXTS, ("train.tsv, line 4", "label")
    ),
    "tsv: Latin-1": Refusal(texts(TEXTS, "latin-1"), READ_TEXTS, ("train.tsv", "line 2", "UTF-8")),
    "tsv: empty": Refusal(texts(b""), READ_TEXTS, ("train.tsv", "label")),
    # Pictures by class.
    "folders: accents apart, composed in the setting": Result(
        pictures(f"{SPLIT_CAFE}/0.png", "tea/1.png"), own("own", *CLASSES), TWO
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
        pictures("tea/\udcff.png", "cocoa/1.png"), own("own"), TWO
    ),
    "folders: an image cut in its middle": Result(
        each(pictures("tea/0.png", "cocoa/1.png"), file("own/tea/2.png", picture(2)[:40])),
        own("own"),
        TWO,
    ),
    "folders: none": Refusal(file("own/readme.txt", "hello"), CHECK, ("own", "class")),
    "list: UTF-16, Windows lines, blank ones": good_list(
        *("0.png,b", "", "1.png,a", ","), names=("0.png", "1.png"), end="\r\n", encoding="utf-16"
    ),
    "list: names of files with accents composed, apart on disk": good_list(
        f"{CAFE}.png,b", "1.png,a", names=(f"{SPLIT_CAFE}.png", "1.png")
    ),
    "list: names of files with accents apart, composed on disk": good_list(
        f"{SPLIT_CAFE}.png,b", "1.png,a", names=(f"{CAFE}.png", "1.png")
    ),
    "list: a letter that the composed form does not have": good_list(
        "\u212b.png,b", "1.png,a", names=("\u212b.png", "1.png")
    ),
    "list: an empty label": bad_list("", "1.png,", names=("list.csv, line 4", "label")),
    "list: Latin-1": bad_list("1.png,é", names=("list.csv", "line 3", "UTF-8"), encoding="latin-1"),
    "tar: labels with a mark, a line end and accents apart": Result(
        file("own.tar", archive(SPLIT_CAFE.encode("utf-8-sig") + b"\r\n", b"a", CAFE.encode())),
        own("own.tar"),
        [(0, 1), (1, 0), (2, 1)],
    ),
    # Partitions.
    "json: byte order mark": Result(file("split.json", SPLIT, "utf-8-sig"), index, GOOD_SPLIT),
    "json: UTF-16": Result(file("split.json", SPLIT, "utf-16"), index, GOOD_SPLIT),
    "json: a node twice": bad_split('{"0": [0], "1": [1], "0": [2]}', "'0'"),
    "json: a hundred thousand brackets": bad_split("[" * 100_000),
    "json: cut off": bad_split(lines('{"0": [0],', '"1": [1'), "line 3"),
    # Settings.
    "toml: byte order mark": good_run_config("[train]\nlr = 0.5\n", "utf-8-sig"),
    "toml: UTF-16, Windows lines": good_run_config("[train]\r\nlr = 0.5\r\n", "utf-16"),
    "toml: Latin-1": bad_run_config(
        "run.toml", lines("# fine", 'a.b = "é,b"'), "line 2", "UTF-8", encoding="latin-1"
    ),
    "toml: a broken line": bad_run_config("run.toml", lines("n = 2", "[train"), "line 2"),
    "toml: a folder": bad_run_config("run.toml/x", ""),
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
        each(file("certs/issued.json", "[]"), *(file(f"certs/{name}", b"\xff") for name in KEYS)),
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
    case = INPUTS[name]
    case.write(tmp_path)
    if isinstance(case, Result):
        assert case.read(tmp_path) == case.expected
    else:
        arguments = [part.replace("{}", str(tmp_path)) for part in case.command.split()]
        check_refusal(CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}), case.names)
