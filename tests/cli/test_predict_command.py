"""`flwr-distill predict`: from an exported model and image files to classes."""

import json

import numpy as np
import onnx
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.server.export.description import KEY
from flwr_distill.server.export.model import FILES, export_model
from flwr_distill.server.export.prediction import read_model
from flwr_distill.server.page.run_files import read_run
from flwr_distill.task.datasets.types import normalise
from flwr_distill.task.models import create_model

from .commands import assert_refused, command

FORMATS = sorted(FILES)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")


@pytest.fixture
def export(finished_run, tmp_path):
    """Export a run's model in a format."""
    run = read_run(finished_run())
    return lambda form: export_model(run, form, tmp_path / "out")


@pytest.fixture
def images(tmp_path):
    """A grey image of the model's size, and a larger one in colour."""
    rng = np.random.default_rng(0)
    files = [tmp_path / "grey.png", tmp_path / "colour.png"]
    for file, shape in zip(files, [(8, 8), (20, 30, 3)], strict=True):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)
    return files


def predict(*arguments):
    return command("predict", *arguments)


@pytest.mark.parametrize("form", FORMATS)
def test_an_exported_model_gives_what_the_network_gives_in_training(form, export, images):
    exported = read_model(export(form))
    spec = exported.description.spec
    network = create_model("auto", spec, seed=0).eval()
    pixels = np.asarray(Image.open(images[0]), dtype=np.uint8)[None, None]
    expected = network(normalise(pixels, spec))[0].double().softmax(0).detach()
    findings = exported.probabilities(images[0])
    assert np.allclose(findings, expected, atol=1e-5)
    assert findings.sum() == pytest.approx(1.0)


def test_each_image_has_its_class_its_probability_and_the_next_best(export, images):
    model = export("onnx")
    result = predict(model, *images)
    assert result.exit_code == 0, result.output
    for image in images:
        (line,) = (line for line in result.stdout.splitlines() if image.name in line)
        top = read_model(model).probabilities(image).topk(3)
        assert line.count("%") == 3
        for index, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            assert f"{100 * probability:.1f} %" in line
            assert f" {index} " in line


def test_classes_are_called_by_the_names_that_the_file_gives_them(export, images):
    program = onnx.load(export("onnx"))
    description = json.loads(program.metadata_props[0].value)
    description["spec"]["labels"]["classes"] = [f"[b]c{label}" for label in range(10)]
    onnx.helper.set_model_props(program, {KEY: json.dumps(description)})
    onnx.save(program, images[0].with_name("named.onnx"))
    result = predict(images[0].with_name("named.onnx"), images[0])
    assert "[b]c" in result.stdout


def test_what_cannot_be_predicted_is_said_in_one_line(export, images, tmp_path):
    model = export("onnx")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    weights = export("safetensors")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(weights), bare)
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(model.read_bytes()[:1000])
    (tmp_path / "cut.pt").write_bytes(b"PK")
    (tmp_path / "cut.safetensors").write_bytes(b"{}")
    for arguments, reason in [
        ((model, tmp_path / "none.png"), "none.png: no such file"),
        ((model, broken), "broken.png"),
        ((model, tmp_path), "is a folder (name its files"),
        ((tmp_path / "none.onnx", images[0]), "none.onnx"),
        ((images[0], images[0]), ".onnx, .pt, .safetensors"),
        ((bare, images[0]), "bare.safetensors"),
        ((cut, images[0]), "cut.onnx"),
        ((tmp_path / "cut.pt", images[0]), "cut.pt"),
        ((tmp_path / "cut.safetensors", images[0]), "cut.safetensors"),
    ]:
        result = predict(*arguments)
        assert result.exit_code == 1, arguments
        assert result.stdout == ""
        assert reason in result.stderr
        assert result.stderr.startswith("flwr-distill predict: ")
        assert result.stderr.count("\n") == 1, result.stderr


def test_images_that_cannot_be_read_do_not_cost_the_others_their_classes(export, images, tmp_path):
    broken, missing = tmp_path / "broken.png", tmp_path / "missing.png"
    broken.write_bytes(images[0].read_bytes()[:60])
    result = predict(export("onnx"), broken, images[0], missing, images[1])
    assert result.exit_code == 1
    assert all(image.name in result.stdout for image in images)
    assert broken.name not in result.stdout
    first, second = result.stderr.splitlines()
    assert str(broken) in first
    assert str(missing) in second


def test_names_that_a_terminal_cannot_show_do_not_end_a_command(export, images, tmp_path):
    odd = tmp_path / "\udcff é.png"  # bytes of another encoding
    odd.write_bytes(images[0].read_bytes())
    words = ["predict", str(export("onnx")), str(odd)]
    for charset, shown in (("ascii", "\\udcff \\xe9.png"), ("utf-8", "\\udcff é.png")):
        result = CliRunner(charset=charset).invoke(app, words, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert shown in result.stdout


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": "os:getcwd"}, "--format onnx"),
        ({"model": "nosuch"}, "nosuch"),
        ({"labels": {"classes": ["only one"]}}, "1 names"),
        ({"labels": {"classes": ["\x1b[2J"] * 10}}, "classes"),
        ({"labels": {"classes": ["1", "01", *"23456789"]}}, "same number"),
        ({"num_classes": 10**12, "labels": {}}, "classes"),
        ({"shape": "x"}, "spec.shape"),
    ],
)
def test_a_description_that_somebody_else_wrote_is_not_believed(changed, reason, export, tmp_path):
    original = export("safetensors")
    description = json.loads(read_model(original).description.to_json())
    changes = dict(changed)
    description["model"] = changes.pop("model", "auto")
    description["spec"] |= changes
    file = tmp_path / "other.safetensors"
    save_file(load_file(original), file, {KEY: json.dumps(description)})
    assert_refused(predict(file, original), reason)


def test_texts_are_not_predicted_from_image_files(export, tmp_path):
    original = export("onnx")
    program = onnx.load(original)
    description = json.loads(program.metadata_props[0].value)
    description["spec"]["kind"] = "text"
    onnx.helper.set_model_props(program, {KEY: json.dumps(description)})
    onnx.save(program, original)
    assert "of kind text" in predict(original, original).stderr
