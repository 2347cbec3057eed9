"""Files are what they were, or they are read again: for all that is read from disk."""

import os
import shutil

import pytest

from flwr_distill.task import file_state
from flwr_distill.task.datasets import auxiliary_files, dataset_files
from flwr_distill.task.datasets.registry import dataset_names
from flwr_distill.task.file_state import FilesChangedError, read_once, state_of
from tests.errors import at


@pytest.fixture
def folder(tmp_path):
    """Two files in a class folder, one in another, which a link leads to."""
    root = tmp_path / "data"
    for name, text in (("a/1.png", "one"), ("a/2.png", "two"), ("b/3.png", "three")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    elsewhere = tmp_path / "elsewhere.png"
    elsewhere.write_text("four")
    (root / "b" / "4.png").symlink_to(elsewhere)
    (root / "b" / "upwards").symlink_to(root)
    return root


def rewritten_with_its_time(folder):
    """Of the same size, with the time that it had: as by ``cp -p`` from a copy of that time."""
    file = folder / "a" / "1.png"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text("eno")
    os.utime(file, ns=times)


CHANGES = {
    "rewritten": lambda folder: (folder / "a" / "1.png").write_text("other"),
    "rewritten with its time": rewritten_with_its_time,
    "added": lambda folder: (folder / "a" / "5.png").write_text("five"),
    "removed": lambda folder: (folder / "a" / "1.png").unlink(),
    "in another class": lambda folder: (folder / "a" / "1.png").rename(folder / "b" / "1.png"),
    "a class by another name": lambda folder: (folder / "a").rename(folder / "c"),
    "an empty class": lambda folder: (folder / "c").mkdir(),
    "behind a link": lambda folder: (folder.parent / "elsewhere.png").write_text("new"),
    "all gone": shutil.rmtree,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_has_another_state_when_anything_in_it_changes(folder, change):
    before = state_of([folder])
    (folder / "a" / ".thumbnail.png").write_text("hidden")
    assert state_of([folder]) == before
    CHANGES[change](folder)
    assert state_of([folder]) != before


@pytest.fixture
def reader(tmp_path):
    """A file, a function that reads it once, and the calls of its."""
    file, calls = tmp_path / "data.txt", []
    file.write_text("old")

    @read_once(lambda name: [tmp_path / name], maxsize=2)
    def read(name):
        calls.append(name)
        return (tmp_path / name).read_text()

    return file, read, calls


def test_what_is_unchanged_is_read_once_and_what_has_changed_again(reader):
    file, read, calls = reader
    assert [read(file.name), read(file.name)] == ["old", "old"]
    assert len(calls) == 1
    file.write_text("new")
    assert [read(file.name), read(file.name)] == ["new", "new"]
    assert len(calls) == 2
    before = state_of([file, file.with_name("missing")])
    file.with_name("missing").write_text("there")
    assert state_of([file, file.with_name("missing")]) != before


def test_what_another_process_read_is_used_until_the_file_changes(reader):
    file, read, calls = reader
    assert read.state(file.name) is None
    read.take("theirs", state_of([file]), file.name)
    assert read.state(file.name) == state_of([file])
    assert (read(file.name), calls) == ("theirs", [])
    file.write_text("new")
    assert (read(file.name), calls) == ("new", [file.name])
    read.take("late", b"another state", file.name)
    assert read(file.name) == "new"


def test_a_bounded_number_of_results_is_kept(reader):
    file, read, calls = reader
    names = [file.name, "b", "c", file.name]
    for name in names[1:3]:
        (file.parent / name).write_text(name)
    for name in names:
        read(name)
    assert calls == names


def test_of_files_that_change_while_they_are_read_no_half_old_result_is_kept(tmp_path):
    parts = [tmp_path / "images", tmp_path / "labels"]
    for part in parts:
        part.write_text("old")
    changes = ["new"]

    @read_once(lambda: parts, maxsize=1)
    def read():
        first = parts[0].read_text()
        while changes:
            for part in parts:
                part.write_text(changes[-1])
            changes.pop()
        return first, parts[1].read_text()

    assert read() == ("new", "new")


def test_files_that_change_each_time_that_they_are_read_are_an_error(tmp_path):
    file = tmp_path / "data.txt"

    @read_once(lambda: [file], maxsize=1)
    def read():
        with file.open("a") as content:
            content.write("more")

    with pytest.raises(FilesChangedError, check=at(file)):
        read()


def test_a_folder_of_too_many_files_is_read_each_time(folder, monkeypatch):
    monkeypatch.setattr(file_state, "MAX_FILES", 3)
    calls = []

    @read_once(lambda: [folder], maxsize=1)
    def read():
        calls.append(state_of([folder]))

    read()
    read()
    assert calls == [None, None]


@pytest.mark.parametrize("name", [*dataset_names(), "cifar10-c/contrast-3", "their_pkg:load"])
def test_the_files_of_every_data_set_are_known_but_those_of_the_embedded_one(tmp_path, name):
    assert bool(dataset_files(name, tmp_path)) == (name != "digits")


@pytest.mark.parametrize("name", ["cifar100", "tiny-imagenet", "folder/of/images", "a.npz"])
def test_so_are_those_of_auxiliary_sets(tmp_path, name):
    assert auxiliary_files(name, tmp_path)
    assert not auxiliary_files("noise", tmp_path)


def test_results_are_kept_up_to_a_total_size_the_last_ones_used():
    calls = []

    @read_once(lambda name: [], maxsize=5, size=len)
    def read(name):
        calls.append(name)
        return name

    for name in ("aa", "bb", "aa", "cc", "bb", "much-too-large", "much-too-large"):
        read(name)
    assert calls == ["aa", "bb", "cc", "bb", "much-too-large"]
