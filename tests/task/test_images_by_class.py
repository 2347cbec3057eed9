"""Images by class are the same data in whatever way they are stored, for every command."""

import csv
import gzip
import io
import json
import os
import sys
import tarfile
import tracemalloc
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image
from pyarrow import parquet
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.cli.source import load_source
from flwr_distill.client.session import Session
from flwr_distill.task.datasets import DatasetError, DataSpec, labels_of, load_private_data
from flwr_distill.task.file_state import FilesChangedError
from flwr_distill.task.image_files import class_names
from flwr_distill.task.labels import LabelMap
from flwr_distill.task.survey import survey
from tests.errors import at

SPEC = DataSpec("colour", (3, 6, 8), 2, (0.0,) * 3, (1.0,) * 3)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 6, 8, 3), dtype=np.uint8)
NAMES = ["dog", "cat", "dog", "cat", "cat", "cat"]


def encoded(pixels, suffix="png"):
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, suffix)
    return content.getvalue()


def class_folders(root, pixels=PIXELS, names=NAMES):
    for number, (image, name) in enumerate(zip(pixels, names, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{number}.png").write_bytes(encoded(image))
    return root


def listed(root, pixels=PIXELS, names=NAMES):
    (root / "images").mkdir(parents=True, exist_ok=True)
    rows = [["label", "file", "age"]]
    for number, (image, name) in enumerate(zip(pixels, names, strict=True)):
        place = f"images/{number}.png" if number % 2 else f"{number}.png"
        (root / place).write_bytes(encoded(image))
        rows.append([name, place, "47"])
    with (root / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root


def member(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def shard(file, pixels=PIXELS, names=NAMES, start=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for number, (image, name) in enumerate(zip(pixels, names, strict=True), start):
            key = f"ward.{number}/{number:06}" if number % 2 else f"{number:06}"
            member(archive, f"{key}.cls", f"{name}\n".encode())
            member(archive, f"{key}.json", b"{}")
            member(archive, f"{key}.png", encoded(image))
    return file


def webdataset_file(root, pixels=PIXELS, names=NAMES):
    return shard(root / "own.tar", pixels, names)


def webdataset_folder(root, pixels=PIXELS, names=NAMES):
    shard(root / "own-000.tar", pixels[:2], names[:2])
    shard(root / "own-001.tar", pixels[2:], names[2:], start=2)
    return root


def hugging_face(pixels, names, image="image", label="label"):
    features = datasets.Features(
        {image: datasets.Image(), label: datasets.ClassLabel(names=["dog", "cat"])}
    )
    images = [Image.fromarray(each) for each in pixels]
    return datasets.Dataset.from_dict({image: images, label: list(names)}, features=features)


def table(root, pixels, names):
    root.mkdir(parents=True, exist_ok=True)
    return pyarrow.table({"label": names, "image": [encoded(each) for each in pixels]})


def saved_to_disk(root, pixels=PIXELS, names=NAMES):
    hugging_face(pixels, names).save_to_disk(root, num_shards=2)
    return root


def saved_split(root, pixels=PIXELS, names=NAMES):
    datasets.DatasetDict({"train": hugging_face(pixels, names, "img", "fine")}).save_to_disk(root)
    return root


def parquet_of_classes(root, pixels=PIXELS, names=NAMES):
    root.mkdir(parents=True, exist_ok=True)
    hugging_face(pixels, names).to_parquet(root / "train-00000-of-00001.parquet")
    return root


def parquet_of_names(root, pixels=PIXELS, names=NAMES):
    parquet.write_table(table(root, pixels, names), root / "own.parquet", row_group_size=4)
    return root


def arrow_file(root, pixels=PIXELS, names=NAMES):
    content = table(root, pixels, names)
    with pyarrow.ipc.new_file(root / "own.arrow", content.schema) as writer:
        writer.write_table(content)
    return root


KINDS = [
    listed,
    webdataset_file,
    webdataset_folder,
    saved_to_disk,
    saved_split,
    parquet_of_classes,
    parquet_of_names,
    arrow_file,
]
every_kind = pytest.mark.parametrize("store", KINDS, ids=lambda store: store.__name__)


def in_order(raw):
    """Images of a data set with their labels, sorted: kinds store them in another order."""
    return sorted(zip(raw.labels.tolist(), (image.tobytes() for image in raw.images), strict=True))


@every_kind
def test_a_node_reads_the_same_images_and_labels_as_from_class_folders(tmp_path, store):
    path = store(tmp_path / "own")
    expected = load_private_data(class_folders(tmp_path / "folders"), SPEC)
    assert in_order(load_private_data(path, SPEC)) == in_order(expected)
    assert class_names(path) == ("cat", "dog")
    three = replace(SPEC, num_classes=3, labels=LabelMap(("mouse", "dog", "cat")))
    assert set(load_private_data(path, three).labels) == {1, 2}
    assert labels_of(path, ["dog"], three) == [1]
    with pytest.raises(DatasetError, match=r"dog: not among .*private\.classes"):
        load_private_data(path, replace(SPEC, labels=LabelMap(("cat", "mouse"))))


NAMELESS = [listed, webdataset_file, webdataset_folder, parquet_of_names, arrow_file]


@pytest.mark.parametrize("store", NAMELESS, ids=lambda store: store.__name__)
def test_numbers_are_labels(tmp_path, store):
    path = store(tmp_path / "own", names=["3", "1", "3", "1", "1", "0"])
    assert class_names(path) == ()
    spec = DataSpec("colour", (3, 6, 8), 4, (0.0,) * 3, (1.0,) * 3)
    assert sorted(load_private_data(path, spec).labels) == [0, 1, 1, 1, 3, 3]
    with pytest.raises(DatasetError, match=r'positions .*private\.classes="0,1,3"'):
        load_private_data(path, SPEC)


@every_kind
def test_distill_audit_and_data_check_load_the_same(tmp_path, store):
    path, folders = store(tmp_path / "own"), class_folders(tmp_path / "folders")
    sources = [load_source(str(p), data_root=None, shape=None, seed=0) for p in (path, folders)]
    one, other = sources
    assert one.class_names == other.class_names == ("cat", "dog")
    assert one.spec.shape == other.spec.shape == (3, 6, 8)
    images = [torch.cat([s.train.inputs, s.held_back.inputs]).sum((1, 2, 3)) for s in sources]
    torch.testing.assert_close(images[0].sort().values, images[1].sort().values)
    command = ["data", "check", str(path), "--output", str(tmp_path / "results")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found, expected = survey(path), survey(folders)
    assert found.counts == expected.counts == {"cat": 4, "dog": 2}
    assert (found.sizes, found.modes) == (expected.sizes, expected.modes)
    assert found.findings == []
    assert survey(path, decode=False).counts == found.counts


@pytest.fixture
def session(tmp_path):
    def session(path, run_id):
        node = {"state-dir": str(tmp_path / "state"), "device": "cpu", "data": str(path)}
        config = {"dataset": "private", "private.shape": "3x6x8", "private.classes": "cat,dog"}
        return Session.of(Context(run_id, 5, node, RecordDict(), config))

    return session


@every_kind
def test_a_warm_node_reads_what_is_on_disk_and_a_change_during_a_run_is_an_error(
    tmp_path, store, session
):
    path = store(tmp_path / "own")
    session(path, run_id=1)
    assert class_names(path) == ("cat", "dog")
    swapped = [{"dog": "cat", "cat": "dog"}[name] for name in NAMES]
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            file.unlink()
    store(tmp_path / "own", names=swapped)
    labels = session(path, run_id=2).data.train.labels
    assert labels.sum() == 4
    with pytest.raises(FilesChangedError):
        session(path, run_id=1)


@every_kind
def test_one_broken_image_is_skipped_by_name_and_the_others_are_read(tmp_path, store, caplog):
    path = store(tmp_path / "own")
    for file in sorted(path.rglob("*") if path.is_dir() else [path]):
        if file.is_file():
            content = file.read_bytes()
            for image in PIXELS[:1]:
                content = content.replace(encoded(image), encoded(image)[:-40] + bytes(40))
            file.write_bytes(content)
    raw = load_private_data(path, SPEC)
    assert len(raw) == 5
    (record,) = caplog.records
    assert "skipped 1 unusable file" in record.getMessage()
    assert "0" in record.getMessage().partition("first ")[2]


@pytest.mark.parametrize("store", [webdataset_file, parquet_of_names, arrow_file, saved_to_disk])
def test_images_that_do_not_fit_into_memory_are_read_one_by_one(tmp_path, store):
    large = RNG.integers(0, 256, (60, 256, 256, 3), dtype=np.uint8)
    path = store(tmp_path / "own", large, ["dog", "cat"] * 30)
    size = 60 * 256 * 256 * 3
    del large
    load_private_data(path, SPEC)  # imports
    pool = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        load_private_data(path, SPEC)
        peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(usual)
    assert peak < size / 3


LISTS = {
    "outside": ("file,label\n../a.png,cat\n", ", line 2", "within the folder"),
    "absolute": ("file,label\n/a.png,cat\n", ", line 2", "within the folder"),
    "windows": ("file,label\n..\\a.png,cat\n", ", line 2", "within the folder"),
    "no label": ("file,label\na.png,\n", ", line 2", "no label"),
    "short": ("file,label\na.png\n", ", line 2", "1 values"),
    "twice": ("file,label\na.png,cat\na.png,dog\n", ", line 3", "a.png is in line 2"),
    "columns": ("file,label,label\na.png,cat,dog\n", "", "one column label"),
    "bytes": (b"file,label\n\xff.png,cat\n", "", "UTF-8"),
}


@pytest.mark.parametrize(("text", "line", "said"), LISTS.values(), ids=LISTS)
def test_a_wrong_list_is_an_error_with_its_line(tmp_path, text, line, said):
    (tmp_path / "a.png").write_bytes(encoded(PIXELS[0]))
    listing = tmp_path / "labels.csv"
    listing.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DatasetError, match=said, check=at(f"{listing}{line}")) as caught:
        load_private_data(tmp_path, SPEC)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["9" * 5000, '"cat, old"'])
def test_a_label_that_no_setting_can_list_is_an_error(tmp_path, name):
    (tmp_path / "labels.csv").write_text(f"file,label\na.png,{name}\n")
    with pytest.raises(DatasetError, match="needs another name"):
        load_private_data(tmp_path, SPEC)


def test_a_list_of_another_system_is_read_and_links_are_followed(tmp_path):
    listed(tmp_path / "own")
    (tmp_path / "own" / "2.png").rename(tmp_path / "two.png")
    os.symlink(tmp_path / "two.png", tmp_path / "own" / "2.png")
    file = tmp_path / "own" / "labels.csv"
    text = file.read_text().replace("label,file", "Label,File").replace("images/", "images\\")
    file.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n")
    assert len(load_private_data(tmp_path / "own", SPEC)) == 6


def test_files_that_a_list_does_not_name_or_that_are_missing_are_counted(tmp_path):
    listed(tmp_path)
    (tmp_path / "2.png").unlink()
    (tmp_path / "other.png").write_bytes(encoded(PIXELS[0]))
    found = survey(tmp_path)
    assert [(f.kind, f.place) for f in found.findings] == [
        ("stray", "2.png"),
        ("stray", "other.png"),
    ]
    assert found.usable == 5


def test_two_lists_or_two_kinds_in_one_folder_are_ambiguous(tmp_path):
    listed(tmp_path)
    (tmp_path / "more.csv").write_text("file,label\n0.png,dog\n")
    with pytest.raises(DatasetError, match=r"labels\.csv, more\.csv", check=at(tmp_path)):
        load_private_data(tmp_path, SPEC)
    parquet_of_names(tmp_path)
    with pytest.raises(DatasetError, match="at once", check=at(tmp_path)):
        load_private_data(tmp_path, SPEC)


def odd_members(archive):
    for name in ("/etc/a.png", "../up.png", "noending"):
        member(archive, name, encoded(PIXELS[0]))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        info = tarfile.TarInfo(f"link{int(kind)}.png")
        info.type, info.linkname = kind, "000000.png"
        archive.addfile(info)
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    archive.addfile(folder)
    member(archive, "._000001.png", b"of a Mac")
    member(archive, "alone.png", encoded(PIXELS[0]))
    member(archive, "label.cls", b"cat")
    member(archive, "both.png", encoded(PIXELS[0]))
    member(archive, "both.jpg", encoded(PIXELS[0]))
    member(archive, "both.cls", b"cat")
    member(archive, "long.cls", b"x" * 1000)


def test_odd_members_are_skipped_with_a_count_and_nothing_is_written(tmp_path, monkeypatch):
    file = webdataset_file(tmp_path / "own")
    with tarfile.open(file, "a") as archive:
        odd_members(archive)
    before = sorted(tmp_path.rglob("*"))
    for name in ("extract", "extractall", "_extract_member"):
        monkeypatch.setattr(tarfile.TarFile, name, lambda *args, **kwargs: pytest.fail("extracted"))
    found = survey(file)
    assert found.counts == {"cat": 4, "dog": 2}
    kinds = [finding.kind for finding in found.findings]
    assert (kinds.count("stray"), kinds.count("unreadable")) == (8, 3)
    assert len(load_private_data(file, SPEC)) == 6
    assert sorted(tmp_path.rglob("*")) == before


def huge(content):
    """The first member declares 8 EiB."""
    info = tarfile.TarInfo("a.png")
    info.size = 1 << 62
    return info.tobuf(tarfile.GNU_FORMAT) + content


def huge_name(content):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 31
    return info.tobuf(tarfile.GNU_FORMAT) + content


def backwards(content):
    """A second member of a negative size, so that the next one would be itself again."""
    info = tarfile.TarInfo("a.png")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + (-512 & 0xFFFF).to_bytes(2, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return content[:1024] + bytes(block) + content[1024:]


TARS = {
    "huge": huge,
    "huge name": huge_name,
    "backwards": backwards,
    "cut": lambda content: content[: len(content) // 2],
    "header": lambda content: content[:2048] + b"x" * 512 + content[2560:],
    "no end": lambda content: content.rstrip(b"\0"),
    "empty": lambda content: b"",
    "gzip": gzip.compress,
    "noise": lambda content: bytes(RNG.integers(0, 256, 4096, dtype=np.uint8)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", TARS.values(), ids=TARS)
def test_a_damaged_or_hostile_tar_is_one_line_in_little_memory(tmp_path, damage):
    file = webdataset_file(tmp_path / "own")
    file.write_bytes(damage(file.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=r"own\.tar") as caught:
            load_private_data(file, SPEC)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert len(str(caught.value).splitlines()) == 1


def test_a_label_that_is_no_text_is_an_error_with_its_member(tmp_path):
    with tarfile.open(tmp_path / "own.tar", "w") as archive:
        member(archive, "a.cls", b"caf\xe9")
        member(archive, "a.png", encoded(PIXELS[0]))
    with pytest.raises(DatasetError, match="UTF-8", check=at(f"{tmp_path}/own.tar, a.cls")):
        load_private_data(tmp_path / "own.tar", SPEC)


def test_several_splits_are_refused_by_name(tmp_path):
    both = datasets.DatasetDict(train=hugging_face(PIXELS, NAMES), test=hugging_face(PIXELS, NAMES))
    both.save_to_disk(tmp_path / "saved")
    with pytest.raises(DatasetError, match="train, test"):
        load_private_data(tmp_path / "saved", SPEC)
    assert len(load_private_data(tmp_path / "saved" / "train", SPEC)) == 6
    (tmp_path / "parquet").mkdir()
    for split in both:
        both[split].to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DatasetError, match="several splits"):
        load_private_data(tmp_path / "parquet", SPEC)


def test_rows_without_an_image_or_a_label_are_skipped_and_counted(tmp_path):
    images = [{"bytes": encoded(p), "path": None} for p in PIXELS]
    (tmp_path / "secret.png").write_bytes(encoded(PIXELS[0]))
    images[1] = {"bytes": None, "path": str(tmp_path / "secret.png")}  # is never followed
    images[2] = None
    labels = [0, 1, 1, None, -1, 1]
    (tmp_path / "own").mkdir()
    table = pyarrow.table({"image": images, "label": pyarrow.array(labels, pyarrow.int64())})
    parquet.write_table(table, tmp_path / "own" / "own.parquet")
    found = survey(tmp_path / "own")
    assert found.counts == {"0": 1, "1": 1}
    places = [f"own.parquet/row {row}" for row in (1, 2, 3, 4)]
    assert [finding.place for finding in found.findings] == places


def test_shards_of_an_earlier_save_are_not_read(tmp_path):
    hugging_face(PIXELS, NAMES).save_to_disk(tmp_path, num_shards=3)
    stale = tmp_path / "data-00001-of-00003.arrow"
    content = stale.read_bytes()
    hugging_face(PIXELS, NAMES).save_to_disk(tmp_path, num_shards=1)
    stale.write_bytes(content)
    assert len(load_private_data(tmp_path, SPEC)) == 6


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_state_file_leads_to_no_file_outside(tmp_path, is_absolute):
    saved_to_disk(tmp_path / "own")
    (tmp_path / "own" / "data-00000-of-00002.arrow").rename(tmp_path / "other.arrow")
    state = json.loads((tmp_path / "own" / "state.json").read_text())
    filename = str(tmp_path / "other.arrow") if is_absolute else "../other.arrow"
    state["_data_files"] = [{"filename": filename}]
    (tmp_path / "own" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DatasetError):
        load_private_data(tmp_path / "own", SPEC)


@pytest.mark.parametrize("store", [parquet_of_classes, saved_to_disk, arrow_file])
def test_a_damaged_file_of_rows_is_one_line_with_its_name(tmp_path, store):
    path = store(tmp_path / "own")
    file = next(each for each in sorted(path.iterdir()) if each.suffix in (".arrow", ".parquet"))
    content = file.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], bytes(len(content))):
        file.write_bytes(damaged)
        with pytest.raises(DatasetError, match=file.name) as caught:
            load_private_data(path, SPEC)
        assert len(str(caught.value).splitlines()) == 1


def test_without_an_image_column_the_error_names_those_there_are(tmp_path):
    file = tmp_path / "own.parquet"
    parquet.write_table(pyarrow.table({"picture": [b""], "label": [0]}), file)
    with pytest.raises(DatasetError, match=r"'image'.*picture, label", check=at(file)):
        load_private_data(tmp_path, SPEC)


def test_no_data_set_is_cached_elsewhere(tmp_path, monkeypatch):
    path = parquet_of_classes(tmp_path / "own")
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    load_private_data(path, SPEC)
    assert not (tmp_path / "home").exists()


def test_without_pyarrow_the_data_are_refused_with_the_extra(tmp_path, monkeypatch):
    parquet_of_names(tmp_path)
    for name in [*(n for n in sys.modules if n.startswith("pyarrow")), "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DatasetError, match=r"own\.parquet: .*flwr-distill\[parquet\]"):
        load_private_data(tmp_path, SPEC)


def test_class_folders_with_another_table_beside_them_stay_class_folders(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "notes.csv").write_text("patient,age\n1,47\n")
    (tmp_path / "backup.tar").write_bytes(b"")
    assert class_names(tmp_path) == ("cat", "dog")
    places = [finding.place for finding in survey(tmp_path).findings]
    assert places == ["backup.tar", "notes.csv"]
