import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_distill.task.datasets import DatasetError, DataSpec, labels_of, load_private_data
from flwr_distill.task.image_files import class_names
from flwr_distill.task.labels import LabelMap
from tests.errors import at

GREY = DataSpec("grey", (1, 6, 8), 3, (0.25,), (0.5,))
COLOUR = DataSpec("colour", (3, 6, 8), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def named(*classes):
    return replace(GREY, labels=LabelMap(classes))


def save(path, colour=(200, 100, 0), size=(8, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def folders(root, *names):
    """A folder for each class, with an image of the brightness of its first letter."""
    for name in map(str, names):
        save(root / name / "a.png", colour=(ord(name[0]),) * 3)
    return root


def numbered(folder, kind, *labels):
    """An image of each of these labels, as class folders or as an npz."""
    if kind == "folders":
        return folders(folder, *labels)
    images = np.zeros((len(labels), 6, 8), np.uint8)
    np.savez(folder / "own.npz", images=images, labels=np.array(labels, np.uint8))
    return folder / "own.npz"


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["2", "0"], [0, 2]),  # positions, of which one is missing
        (["cat", "ant", "dog"], [0, 1, 2]),
        (["01", "02", "10"], [0, 1, 2]),  # with leading zeros they are names
    ],
)
def test_folders_are_positions_if_they_are_whole_numbers_and_else_in_order(tmp_path, names, labels):
    raw = load_private_data(folders(tmp_path, *names), GREY)
    assert raw.labels.tolist() == labels
    assert raw.labels.dtype == np.int64
    assert raw.images[:, 0, 0, 0].tolist() == sorted(ord(name[0]) for name in names)


def test_an_empty_class_folder_keeps_the_numbering(tmp_path):
    (tmp_path / "ant").mkdir()
    assert load_private_data(folders(tmp_path, "cat", "dog"), GREY).labels.tolist() == [1, 2]


def test_named_folders_are_the_classes_that_the_run_lists_and_some_may_be_missing(tmp_path):
    raw = load_private_data(folders(tmp_path, "dog", "cat"), named("dog", "ant", "cat"))
    assert raw.labels.tolist() == [2, 0]
    assert class_names(tmp_path) == ("cat", "dog")


@pytest.mark.parametrize(
    ("kind", "own", "classes", "said"),
    [
        (
            "folders",
            ["bird", "cat", "wolf"],
            ["ant", "cat", "dog"],
            "bird and wolf: .*ant, cat",
        ),
        ("folders", [1, 2], ["mild", "medium", "severe"], "1 and 2: .*mild, medium and severe"),
        ("folders", ["01", "02", "10"], ["1", "2", "10"], "01 and 02"),
        ("folders", [0, 1], ["1", "2", "3"], "0: .*1, 2 and 3"),
        ("npz", [0, 1], ["1", "2", "3"], "0: .*1, 2 and 3"),
        # Without names in the run, they are positions, or in order if all are there.
        ("folders", [1, 2, 3], [], '1, 2 and 3; .*from 0 to 2.*private.classes="1,2,3"'),
        ("folders", ["ant", "bee"], [], "2 classes.*3 classes"),
        ("folders", ["ant", "bee", "cat", "dog"], [], "4 classes.*3 classes"),
    ],
)
def test_classes_that_are_not_the_runs_are_an_error_with_both(tmp_path, kind, own, classes, said):
    path = numbered(tmp_path, kind, *own)
    with pytest.raises(DatasetError, match=said, check=at(path)):
        load_private_data(path, named(*classes))


@pytest.mark.parametrize("names", [["a,b"], ["a\tb"], ["x" * 61], ["1", "01"]])
def test_names_of_folders_that_no_setting_can_list_are_an_error(tmp_path, names):
    folders(tmp_path, *names)
    with pytest.raises(DatasetError, match=r"needs another name|same number"):
        load_private_data(tmp_path, GREY)


def test_without_an_image_a_folder_or_two_channels_nothing_is_read(tmp_path):
    with pytest.raises(DatasetError, match="no class folders", check=at(tmp_path)):
        load_private_data(tmp_path, GREY)
    (tmp_path / "0").mkdir()
    with pytest.raises(DatasetError, match=r"no usable image$", check=at(tmp_path)):
        load_private_data(tmp_path, GREY)
    (tmp_path / "text.txt").write_text("text")
    for name in ("none", "none.npz", "text.txt"):
        with pytest.raises(DatasetError, check=at(tmp_path / name)):
            load_private_data(tmp_path / name, GREY)
    folders(tmp_path, "0")
    with pytest.raises(DatasetError, match="2 channels"):
        load_private_data(tmp_path, DataSpec("two", (2, 6, 8), 3, (0.5,) * 2, (0.5,) * 2))


@pytest.mark.parametrize("kind", ["folders", "npz"])
def test_numbers_among_the_names_that_the_run_lists_are_names_not_positions(tmp_path, kind):
    data = numbered(tmp_path, kind, 1, 3)  # grades from 1 on: the first is no position
    spec = named("1", "3", "2")
    assert load_private_data(data, spec).labels.tolist() == [0, 1]
    assert labels_of(data, ["3"], spec) == [1]


def test_integers_of_a_file_are_positions_where_no_name_is_a_number(tmp_path):
    data = numbered(tmp_path, "npz", 1, 2)
    assert load_private_data(data, named("ant", "cat", "dog")).labels.tolist() == [1, 2]
    assert labels_of(data, ["dog", "0"], named("ant", "cat", "dog")) == [2, 0]


def test_pixels_in_the_right_size_and_channels_are_kept(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    (tmp_path / "1").mkdir()
    Image.fromarray(pixels).save(tmp_path / "1" / "a.png")
    raw = load_private_data(tmp_path, COLOUR)
    assert (raw.images == pixels.transpose(2, 0, 1)[None]).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
def test_images_of_any_mode_and_size_are_brought_to_the_spec(tmp_path, mode, spec):
    save(tmp_path / "0" / "a.png", colour=(255, 255, 255), size=(20, 10), mode=mode)
    images = load_private_data(tmp_path, spec).images
    assert images.shape == (1, *spec.shape)
    assert (images == 255).all()


def test_hidden_files_and_folders_are_skipped(tmp_path):
    save(tmp_path / "0" / "a.png")
    (tmp_path / "0" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    assert len(load_private_data(tmp_path, GREY)) == 1


@pytest.fixture
def broken(tmp_path):
    """A folder with one good image per class, and much that is none."""
    for name in ("0", "1"):
        save(tmp_path / name / "a.png")
    noise = np.random.default_rng(0).integers(0, 256, (60, 80), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "0" / "cut.png")
    cut = (tmp_path / "0" / "cut.png").read_bytes()[:2000]
    (tmp_path / "0" / "cut.png").write_bytes(cut)
    (tmp_path / "0" / "header.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "0" / "empty.jpg").touch()
    Image.new("I", (8, 6), 70000).save(tmp_path / "0" / "deep.tif")
    (tmp_path / "1" / "notes.txt").write_text("no image")
    (tmp_path / "1" / "nested").mkdir()
    (tmp_path / "1" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "1" / "pipe.png")
    (tmp_path / "readme.md").write_text("beside the folders")
    return tmp_path


def test_what_is_no_image_is_skipped_counted_and_named_in_a_warning(broken, caplog):
    raw = load_private_data(broken, GREY)
    assert raw.labels.tolist() == [0, 1]
    (warning,) = caplog.messages
    assert "2 images; skipped 9 unusable files, first readme.md: lies beside" in warning


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("0/cut.png", "not a readable image"),
        ("0/header.png", "not a readable image"),
        ("0/empty.jpg", "not a readable image"),
        ("0/deep.tif", "has 32-bit integers"),
        ("1/notes.txt", "is not an image"),
        ("1/nested", "is a folder within a class folder"),
        ("1/gone.png", "is neither a file nor a link to one"),
        ("1/pipe.png", "is neither a file nor a link to one"),
    ],
)
def test_data_without_one_usable_image_are_refused_with_the_first_reason(
    tmp_path, broken, file, reason
):
    own = tmp_path / "own" / "0"
    own.mkdir(parents=True)
    (broken / file).rename(own / Path(file).name)
    with pytest.raises(DatasetError, match=f"no usable image; skipped 1 .*{file[1:]}: {reason}"):
        load_private_data(own.parent, GREY)


def test_a_decompression_bomb_is_skipped(tmp_path, monkeypatch):
    save(tmp_path / "0" / "a.png")
    save(tmp_path / "0" / "bomb.png", size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert len(load_private_data(tmp_path, GREY)) == 1
