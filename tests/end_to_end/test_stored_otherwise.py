"""Data that are stored otherwise give the accuracy that the same data give without the trouble."""

from functools import cache

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.in_process import run_in_process
from flwr_distill.server.export.prediction import read_model

from .runs import export

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SIDE = 16
WITHIN = 0.01
PICTURES = {
    "dataset": "private",
    "private.shape": f"1x{SIDE}x{SIDE}",
    "private.classes": ",".join(NAMES),
    "model": "random-features",
    "strategy": "analytic",
    "num-rounds": 1,
    "train.holdout": 0.0,
}


def digits():
    """Images from 0 to 255, uint8 (16, 16), with their labels."""
    data = load_digits()
    for pixels, label in zip(data.images, data.target, strict=True):
        grey = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        yield grey.resize((SIDE, SIDE), Image.Resampling.NEAREST), int(label)


def plain(image, file):
    image.save(file.with_suffix(".png"))


def turned(image, file):
    """As a phone stores a portrait."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(file.with_suffix(".png"), exif=exif)


def in_alpha(image, file):
    """Black everywhere, the shape in the alpha channel alone."""
    black = Image.new("RGB", image.size)
    black.putalpha(image)
    black.save(file.with_suffix(".png"))


def flattened(image, file):
    """The same icon without transparency, as a viewer shows it."""
    Image.fromarray(255 - np.asarray(image)).save(file.with_suffix(".png"))


def in_16_bits(image, file):
    Image.fromarray(np.asarray(image).astype(np.uint16) * 257).save(file.with_suffix(".png"))


def as_floats(image, file):
    Image.fromarray(np.asarray(image, np.float32) / 255).save(file.with_suffix(".tif"))


def accuracies(folder, save, *saves_new):
    """Train on two sites' pictures, export, and predict others, stored in each of these ways."""
    new = {how: [] for how in saves_new}
    for number, (image, label) in enumerate(digits()):
        if number < 1500:
            file = folder / f"site-{number % 2}" / NAMES[label] / str(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            save(image, file)
            continue
        for how, pictures in new.items():
            (folder / how.__name__).mkdir(exist_ok=True)
            how(image, folder / how.__name__ / str(number))
            pictures.append((next((folder / how.__name__).glob(f"{number}.*")), label))
    nodes = [{"data": str(folder / f"site-{number}")} for number in range(2)]
    run_in_process(PICTURES, nodes, folder / "runs")
    model = read_model(export(folder / "runs" / "1")[0])
    return [
        np.mean([int(model.probabilities(path).argmax()) == label for path, label in pictures])
        for pictures in new.values()
    ]


@pytest.fixture(scope="module")
def without_trouble(tmp_path_factory):
    """The accuracy where all pictures are stored in one way."""
    return cache(lambda save: accuracies(tmp_path_factory.mktemp(save.__name__), save, save)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "other"),
    [
        pytest.param(plain, turned, id="turned by EXIF"),
        pytest.param(flattened, in_alpha, id="shape in the alpha channel"),
        pytest.param(plain, in_16_bits, id="16 bits"),
        pytest.param(plain, as_floats, id="floats"),
    ],
)
def test_pictures_stored_otherwise_are_learned_and_predicted_as_well(
    tmp_path, without_trouble, right, other
):
    best = without_trouble(right)
    assert best > 0.9
    assert accuracies(tmp_path, other, right, other) == pytest.approx([best, best], abs=WITHIN)


TABLES = {
    "dataset": "csv",
    "strategy": "fedavg",
    "num-rounds": 3,
    "partition.scheme": "iid",
    "train.optimizer": "adam",
    "train.lr": 0.001,
    "train.local-epochs": 6,
}


def table_accuracy(folder, offset, span):
    """Of classes that a column tells which starts at an offset."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", 600), ("test", 200)):
        column, noise = rng.uniform(0, span, count), rng.normal(size=count)
        rows = [
            f"{offset + value:.6f},{other:.4f},{'late' if value > span / 2 else 'early'}"
            for value, other in zip(column, noise, strict=True)
        ]
        (folder / f"{part}.csv").write_text("\n".join(["t,noise,label", *rows]) + "\n")
    rows = run_in_process({**TABLES, "data-root": str(folder)}, [{"num-partitions": 2}] * 2, folder)
    return rows[-1]["accuracy"]


@pytest.mark.parametrize(
    ("offset", "span"),
    [
        pytest.param(1.7e12, 60_000, id="milliseconds since 1970"),
        pytest.param(2_460_000.0, 0.5, id="Julian days", marks=pytest.mark.slow),
        pytest.param(5.8e6, 2.0, id="metres on a map", marks=pytest.mark.slow),
        pytest.param(1e60, 1e60, id="beyond float32", marks=pytest.mark.slow),
    ],
)
def test_a_column_with_a_large_offset_is_learned_as_well_as_one_without(tmp_path, offset, span):
    best = table_accuracy(tmp_path / "without", 0.0, span)
    assert best > 0.97
    assert table_accuracy(tmp_path / "with", offset, span) == pytest.approx(best, abs=WITHIN)
