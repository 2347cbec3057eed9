"""`flwr-distill distill` at its command line, on small images of its own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import flwr_distill.cli.source
from flwr_distill.cli import judge
from flwr_distill.cli.source import load_source
from flwr_distill.distill import VirtualData
from flwr_distill.task.datasets import Dataset, DatasetError, DataSpec, RawSamples
from tests.errors import at

from .commands import assert_refused, command


@pytest.fixture(autouse=True)
def short_judging(monkeypatch):
    short = {
        panel: tuple(replace(one, steps=60 if one.model == "auto" else 3) for one in own)
        for panel, own in judge.JUDGES.items()
    }
    monkeypatch.setattr(judge, "JUDGES", short)


def pixels(n, seed=0, shape=(8, 8)):
    """Images of two kinds by turns: bright above, bright below."""
    images = np.random.default_rng(seed).integers(0, 100, (n, *shape), dtype=np.uint8)
    half = shape[0] // 2
    images[0::2, :half] += 150
    images[1::2, half:] += 150
    return images


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pictures"
    for index, image in enumerate(pixels(40)):
        file = root / ("above", "below")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return root


def save_npz(path, images, labels):
    np.savez(path, images=images, labels=np.asarray(labels, dtype=np.int64))
    return path


def invoke(source, *arguments):
    return command("distill", source, "--device", "cpu", *arguments)


def test_a_folder_becomes_virtual_data_a_picture_and_a_summary(folder, tmp_path):
    output = tmp_path / "deep" / "out"
    arguments = ["--method", "kip", "--per-class", "3", "--steps", "5", "--output", str(output)]
    result = invoke(folder, *arguments)
    assert result.exit_code == 0, result.output
    virtual = VirtualData.from_safetensors((output / "virtual.safetensors").read_bytes())
    assert virtual.images.shape == (6, 1, 8, 8)
    assert virtual.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert virtual.card is not None
    assert virtual.card.yardstick is not None
    with Image.open(output / "virtual.png") as sheet:
        assert min(sheet.size) >= 2 * 48
    summary = json.loads((output / "summary.json").read_text())
    assert summary["class_names"] == ["above", "below"]
    assert (summary["train_images"], summary["held_back_images"]) == (32, 8)
    sizes = {name: score["images"] for name, score in summary["scores"].items()}
    assert list(sizes.values()) == [6, 6, 32]
    assert summary["scores"]["all real images"]["accuracy"] == {"quick": 1}
    assert summary["judges"] == {"quick": {"model": "auto", "steps": 60}}
    assert summary["card"]["yardstick"]["by_chance"] == 0.8
    for reason in (
        "Accuracy on 8 held-back images",
        "Privacy card",
        "80% would be by chance",
        "Caution: KIP",
    ):
        assert reason in result.output


def test_the_full_panel_has_a_column_for_each_judge_whose_network_fits(folder, tmp_path):
    arguments = ["--method", "kip", "--steps", "1", "--judge", "full", "--output", str(tmp_path)]
    result = invoke(folder, *arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    names = ["quick", "ConvNet", "MLP", "ResNet-8"]  # LeNet is for 28x28
    assert list(summary["judges"]) == names
    assert all(f"{name} 0:" in " ".join(result.output.split()) for name in names)  # beforehand
    for scores in summary["scores"].values():
        assert list(scores["accuracy"]) == names
        assert all(0 <= accuracy <= 1 for accuracy in scores["accuracy"].values())


def test_a_named_data_set_is_judged_by_its_test_part(tmp_path):
    arguments = ["--method", "kip", "--per-class", "1", "--steps", "1", "--output", str(tmp_path)]
    result = invoke("digits", *arguments)
    assert result.exit_code == 0, result.output
    assert "Accuracy on 360 held-back images" in result.output


def test_the_same_seed_gives_the_same_files(tmp_path):
    npz = save_npz(tmp_path / "a.npz", pixels(20), [0, 1] * 10)
    created = []
    for name, seed in [("one", "3"), ("two", "3"), ("other", "4")]:
        output = tmp_path / name
        arguments = ["--per-class", "2", "--steps", "2", "--seed", seed, "--output", str(output)]
        result = invoke(npz, *arguments)
        assert result.exit_code == 0, result.output
        files = [(output / name).read_bytes() for name in ("virtual.safetensors", "virtual.png")]
        created.append([*files, json.loads((output / "summary.json").read_text())["scores"]])
    assert created[0] == created[1]
    assert created[0][0] != created[2][0]


def test_more_virtual_than_real_images_are_made_from_noise(tmp_path):
    npz = save_npz(tmp_path / "a.npz", pixels(6), [0, 1] * 3)
    result = invoke(npz, "--per-class", "9", "--steps", "1", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "summary.json").read_text())["scores"]
    assert [score["images"] for score in scores.values()] == [18, 4, 4]


def test_real_start_needs_permission(tmp_path):
    npz = save_npz(tmp_path / "a.npz", pixels(20), [0, 1] * 10)
    arguments = ["--start", "real", "--steps", "1", "--output", str(tmp_path)]
    assert_refused(invoke(npz, *arguments), "allow-real-start = False", "nearly unchanged")
    assert invoke(npz, *arguments, "--allow-real-start").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["digits", "--method", "kpi"], "kpi"),
        (["digits", "--start", "reel"], "reel"),
        (
            ["digits", "--device", "gpu"],
            "device = 'gpu': is unknown (use auto, cpu, cuda",
        ),
        (["digits", "--shape", "1x8x8"], "shape = '1x8x8': is for folders"),
        (["digits", "--output", "/dev/null"], "/dev/null"),
        (["mnist", "--data-root", "/no/such"], "/no/such"),
        (["no/such/folder"], "nor one of the data sets"),
        (["no/such/file.npz"], "nor an existing .npz file"),
        (["no_such:module"], "no_such"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, reason, tmp_path):
    assert_refused(invoke(arguments[0], "--output", str(tmp_path / "out"), *arguments[1:]), reason)


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (pixels(1), [0], "1 image(s), no two of a class"),
        (pixels(2), [0, 1], "2 image(s), no two of a class"),
        (np.full((4, 8, 8), np.nan), [0, 1] * 2, "nan"),
        (pixels(4)[:, 0], [0, 1] * 2, "(4, 8)"),
        (pixels(4), [0, 1, 0], "4 samples"),
        (pixels(4), [-1, 0, -1, 0], "-1"),
        (pixels(4, shape=(2, 2)), [0, 1] * 2, "does not fit"),
    ],
)
def test_unusable_images_are_refused_with_the_reason(images, labels, reason, tmp_path):
    npz = save_npz(tmp_path / "bad.npz", images, labels)
    result = invoke(npz, "--method", "kip", "--steps", "1", "--output", str(tmp_path))
    assert_refused(result, reason)
    assert not isinstance(result.exception, ValueError)


def load(path, shape=None, seed=0):
    return load_source(str(path), data_root=None, shape=shape, seed=seed)


def test_texts_are_refused(monkeypatch):
    raw = RawSamples(np.zeros((2, 1, 1, 8), np.float32), np.array([0, 1]))
    texts = Dataset(DataSpec("ag-news", (1, 1, 8), 2, (0.0,), (1.0,), "text", 9), raw, raw)
    monkeypatch.setattr(flwr_distill.cli.source, "load_dataset", lambda name, root: texts)
    with pytest.raises(DatasetError, check=at("ag-news")):
        load(Path("ag-news"))


def test_images_of_several_sizes_need_a_shape(folder):
    Image.new("RGB", (20, 10)).save(folder / "above" / "wide.png")
    with pytest.raises(DatasetError, match=r"2 sizes \(8x8, 10x20, \.\.\.\).* --shape 3x32x32"):
        load(folder)
    assert load(folder, "1x16x12").spec.shape == (1, 16, 12)


def test_one_colour_image_makes_all_of_them_colour(folder):
    assert load(folder).spec.shape == (1, 8, 8)
    Image.new("RGB", (8, 8)).save(folder / "above" / "red.png")
    assert load(folder).spec.shape == (3, 8, 8)


def test_empty_and_unreadable_folders_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="has no class folders"):
        load(tmp_path)
    (tmp_path / "3").mkdir()
    with pytest.raises(DatasetError, match=r"no usable image$"):
        load(tmp_path)
    (tmp_path / "3" / "a.png").write_text("no image")
    with pytest.raises(DatasetError, match=r"skipped 1 .* 3/a\.png: not a readable image"):
        load(tmp_path)


def test_one_unreadable_image_among_others_is_skipped(folder):
    before = len(load(folder).train)
    (folder / "above" / "zzz.png").write_text("no image")
    assert len(load(folder).train) == before


def test_numbered_folders_keep_their_numbers(folder):
    (folder / "above").rename(folder / "7")
    (folder / "below").rename(folder / "2")
    source = load(folder)
    assert source.train.labels.unique().tolist() == [2, 7]
    assert source.class_names == tuple("01234567")


def test_a_fifth_of_each_class_is_held_back_and_the_rest_is_kept(tmp_path):
    images = np.arange(30, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    npz = save_npz(tmp_path / "a.npz", images, [0] * 20 + [1] * 7 + [2] * 2 + [3])
    source = load(npz)
    assert source.held_back.labels.bincount(minlength=4).tolist() == [4, 1, 1, 0]
    levels = [part.inputs[:, 0, 0, 0].tolist() for part in (source.train, source.held_back)]
    assert len(set(levels[0] + levels[1])) == 30
    assert len(levels[0]) + len(levels[1]) == 30
    assert levels[1] != load(npz, seed=1).held_back.inputs[:, 0, 0, 0].tolist()


def test_small_images_are_trained_on_enlarged_and_cost_no_more_bytes(folder, tmp_path):
    sizes = []
    for formation in ("1", "2"):
        output = tmp_path / formation
        arguments = ["--per-class", "3", "--steps", "2", "--output", str(output)]
        result = invoke(folder, *arguments, "--formation", formation)
        assert result.exit_code == 0, result.output
        sizes.append(len((output / "virtual.safetensors").read_bytes()))
    assert sizes[1] - sizes[0] < 100  # of the header: the card's digits, and formation's name
    assert "6 virtual images of 2 x 2 smaller ones" in result.output
    summary = json.loads((output / "summary.json").read_text())
    assert summary["formation"] == 2
    assert [score["images"] for score in summary["scores"].values()] == [6, 6, 32]
