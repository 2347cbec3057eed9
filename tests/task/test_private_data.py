import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_distill.task.datasets import DatasetError, DataSpec, labels_of, load_private_data
from flwr_distill.task.image_files import class_names
from flwr_distill.task.labels import LabelMap

GREY = DataSpec("grey", (1, 6, 8), 3, (0.25,), (0.5,))
COLOUR = DataSpec("colour", (3, 6, 8), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def named(*classes):
    return replace(GREY, labels=LabelMap(classes))


def numbered(folder, kind, *labels):
    """An image of each of these labels, as class folders or as an npz."""
    if kind == "folders":
        for label in labels:
            _save_image(folder / str(label) / "a.png")
        return folder
    images = np.zeros((len(labels), 6, 8), np.uint8)
    np.savez(folder / "own.npz", images=images, labels=np.array(labels))
    return folder / "own.npz"


def _save_image(path, colour=(200, 100, 0), size=(8, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def test_integer_folder_names_are_the_labels_and_classes_may_be_missing(tmp_path):
    for name in ("2", "0"):
        _save_image(tmp_path / name / "a.png")
    raw = load_private_data(tmp_path, GREY)
    assert raw.labels.tolist() == [0, 2]
    assert raw.labels.dtype == np.int64


def test_numbered_folders_beyond_the_positions_are_named_with_the_setting_that_names_them(tmp_path):
    for name in ("1", "2", "3"):
        _save_image(tmp_path / name / "a.png")
    with pytest.raises(DatasetError) as error:
        load_private_data(tmp_path, GREY)
    assert "1, 2 and 3" in str(error.value)
    assert 'private.classes="1,2,3"' in str(error.value)
    assert "rename" not in str(error.value)


def test_other_folder_names_are_numbered_in_sorted_order(tmp_path):
    for name in ("cat", "ant", "dog"):
        _save_image(tmp_path / name / "a.png", colour=(ord(name[0]),) * 3)
    raw = load_private_data(tmp_path, GREY)
    assert raw.labels.tolist() == [0, 1, 2]
    assert raw.images[:, 0, 0, 0].tolist() == [ord(letter) for letter in "acd"]


def test_named_folders_are_the_classes_that_the_run_lists_and_some_may_be_missing(tmp_path):
    for name in ("dog", "cat"):
        _save_image(tmp_path / name / "a.png")
    raw = load_private_data(tmp_path, named("dog", "ant", "cat"))
    assert raw.labels.tolist() == [2, 0]
    assert class_names(tmp_path) == ("cat", "dog")


def test_folders_that_the_run_does_not_list_are_refused_by_name(tmp_path):
    for name in ("bird", "cat", "wolf"):
        _save_image(tmp_path / name / "a.png")
    with pytest.raises(DatasetError, match=r"bird and wolf: .*ant, cat and dog"):
        load_private_data(tmp_path, named("ant", "cat", "dog"))


@pytest.mark.parametrize("kind", ["folders", "npz"])
def test_numbers_among_the_names_that_the_run_lists_are_names_not_positions(tmp_path, kind):
    """Grades from 1 on: the first is no position."""
    data = numbered(tmp_path, kind, 1, 3)
    spec = named("1", "3", "2")
    assert load_private_data(data, spec).labels.tolist() == [0, 1]
    assert labels_of(data, ["3"], spec) == [1]


@pytest.mark.parametrize("kind", ["folders", "npz"])
def test_a_number_that_is_not_among_the_runs_names_is_refused(tmp_path, kind):
    data = numbered(tmp_path, kind, 0, 1)
    with pytest.raises(DatasetError, match=r"0: .*1, 2 and 3"):
        load_private_data(data, named("1", "2", "3"))


def test_numbered_folders_are_no_positions_where_the_run_lists_other_names(tmp_path):
    data = numbered(tmp_path, "folders", 1, 2)
    with pytest.raises(DatasetError, match=r"1 and 2: .*mild, medium and severe"):
        load_private_data(data, named("mild", "medium", "severe"))


def test_integers_of_a_file_are_positions_where_no_name_is_a_number(tmp_path):
    data = numbered(tmp_path, "npz", 1, 2)
    assert load_private_data(data, named("ant", "cat", "dog")).labels.tolist() == [1, 2]
    assert labels_of(data, ["dog", "0"], named("ant", "cat", "dog")) == [2, 0]


def test_one_number_that_is_written_in_two_ways_is_refused(tmp_path):
    for name in ("1", "01"):
        _save_image(tmp_path / name / "a.png")
    with pytest.raises(DatasetError, match=r"01.* same number"):
        load_private_data(tmp_path, GREY)


def test_numbers_with_leading_zeros_are_names_of_their_own(tmp_path):
    for name in ("01", "02", "10"):
        _save_image(tmp_path / name / "a.png")
    assert load_private_data(tmp_path, GREY).labels.tolist() == [0, 1, 2]
    with pytest.raises(DatasetError, match="01 and 02"):
        load_private_data(tmp_path, named("1", "2", "10"))


@pytest.mark.parametrize("name", ["a,b", "a\tb", "x" * 61])
def test_a_class_folder_that_no_setting_can_list_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DatasetError, match="needs another name"):
        load_private_data(tmp_path, GREY)


def test_an_empty_class_folder_keeps_the_numbering(tmp_path):
    (tmp_path / "ant").mkdir()
    for name in ("cat", "dog"):
        _save_image(tmp_path / name / "a.png")
    assert load_private_data(tmp_path, GREY).labels.tolist() == [1, 2]


def test_pixels_in_the_right_size_and_channels_are_kept(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    (tmp_path / "1").mkdir()
    Image.fromarray(pixels).save(tmp_path / "1" / "a.png")
    raw = load_private_data(tmp_path, COLOUR)
    assert (raw.images == pixels.transpose(2, 0, 1)[None]).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
def test_images_of_any_mode_and_size_are_brought_to_the_spec(tmp_path, mode, spec):
    _save_image(tmp_path / "0" / "a.png", colour=(255, 255, 255), size=(20, 10), mode=mode)
    images = load_private_data(tmp_path, spec).images
    assert images.shape == (1, *spec.shape)
    assert (images == 255).all()


def test_hidden_files_and_folders_are_skipped(tmp_path):
    _save_image(tmp_path / "0" / "a.png")
    (tmp_path / "0" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    assert len(load_private_data(tmp_path, GREY)) == 1


def test_npz_files_are_taken_as_they_are(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.array([2, 0], np.uint8))
    raw = load_private_data(str(tmp_path / "own.npz"), GREY)
    assert (raw.images[:, 0] == images).all()
    assert raw.labels.tolist() == [2, 0]


@pytest.fixture
def broken(tmp_path):
    """A folder with one good image per class, and much that is none."""
    for name in ("0", "1"):
        _save_image(tmp_path / name / "a.png")
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
    _save_image(tmp_path / "0" / "a.png")
    _save_image(tmp_path / "0" / "bomb.png", size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert len(load_private_data(tmp_path, GREY)) == 1


def test_a_linked_image_is_read(tmp_path):
    _save_image(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "own" / "0").mkdir(parents=True)
    (tmp_path / "own" / "0" / "a.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    assert len(load_private_data(tmp_path / "own", GREY)) == 1


def test_a_label_beyond_the_classes_is_named(tmp_path):
    _save_image(tmp_path / "3" / "a.png")
    with pytest.raises(DatasetError, match=r"classes 3; .*from 0 to 2"):
        load_private_data(tmp_path, GREY)


@pytest.mark.parametrize("names", [("ant", "bee"), ("ant", "bee", "cat", "dog")])
def test_named_class_folders_must_be_as_many_as_the_classes(tmp_path, names):
    for name in names:
        _save_image(tmp_path / name / "a.png")
    with pytest.raises(DatasetError, match=f"has {len(names)} classes.*3 classes"):
        load_private_data(tmp_path, GREY)


def test_a_folder_without_class_folders_is_refused(tmp_path):
    _save_image(tmp_path / "a.png")
    with pytest.raises(DatasetError, match="has no class folders"):
        load_private_data(tmp_path, GREY)


def test_class_folders_without_images_are_refused(tmp_path):
    (tmp_path / "0").mkdir()
    with pytest.raises(DatasetError, match=r"no usable image$"):
        load_private_data(tmp_path, GREY)


@pytest.mark.parametrize("name", ["none", "none.npz", "text.txt"])
def test_a_path_that_holds_no_data_is_named(tmp_path, name):
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(DatasetError, match=f"{name}.*neither a folder"):
        load_private_data(tmp_path / name, GREY)


def test_images_cannot_be_brought_to_two_channels(tmp_path):
    _save_image(tmp_path / "0" / "a.png")
    with pytest.raises(DatasetError, match="2 channels"):
        load_private_data(tmp_path, DataSpec("two", (2, 6, 8), 3, (0.5,) * 2, (0.5,) * 2))
