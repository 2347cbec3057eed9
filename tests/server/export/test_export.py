"""A run's model in other formats, and its card."""

import resource

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file

from flwr_distill.server.export import student
from flwr_distill.server.export.card import model_card
from flwr_distill.server.export.model import ExportError, _check, export_model, run_to_export
from flwr_distill.server.export.prediction import read_model
from flwr_distill.server.export.student import Student, distil, export_student
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.record.checkpoint import Checkpoint, save_checkpoint
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model, last_dense
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec
from tests.errors import at

INPUTS = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def run(finished_run):
    return read_run(finished_run())


@pytest.fixture
def logits(run):
    model = create_model("auto", data_spec(TaskSettings()))
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    with torch.no_grad():
        return model.eval()(INPUTS).numpy()


@pytest.fixture
def checkpoint_of(run):
    """Leave a checkpoint of a round, with a model of its own; give its weights."""

    def leave(number, folder=None):
        weights = create_model("auto", data_spec(TaskSettings()), seed=number).state_dict()
        left = Checkpoint(1, number, {}, {}, ArrayRecord(weights), {}, {})
        save_checkpoint(folder or run.folder, left)
        return weights

    return leave


def test_a_student_learns_what_the_model_says_of_images_without_labels():
    spec = data_spec(TaskSettings())
    teacher, small = (create_model("mlp", spec, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        teacher.get_submodule(last_dense(teacher)).weight.mul_(0.01)  # flat, as least squares is
    digits = load_dataset("digits")
    inputs, others = (part.to_samples(spec).inputs for part in (digits.train, digits.test))
    before = agreement(small, teacher, others)
    distil(teacher, small, inputs[:300], seed=0)
    assert agreement(small, teacher, others) > 0.8 > 0.4 > before


def agreement(model, other, inputs):
    with torch.inference_mode():
        said = [each.eval()(inputs).argmax(1) for each in (model, other)]
    return float((said[0] == said[1]).float().mean())


def test_a_student_stands_beside_the_model_and_says_what_its_inputs_are(run, tmp_path, monkeypatch):
    monkeypatch.setattr(student, "EPOCHS", 1)
    wanted = Student("mlp", "noise", 50)
    file, agrees = export_student(run, wanted, "safetensors", tmp_path)
    assert file.name == "student-model.safetensors"
    assert agrees.startswith("it agrees with the model on ")
    model = read_model(file)
    assert model.description.model == "mlp"
    assert model.description.classes == tuple("0123456789")
    assert model.logits(INPUTS).shape == (7, 10)


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_programs_give_the_models_logits(run, logits, tmp_path, form):
    file = export_model(run, form, tmp_path / "out")
    if form == "onnx":
        (found,) = ReferenceEvaluator(str(file)).run(["logits"], {"inputs": INPUTS.numpy()})
    else:
        found = torch.jit.load(file)(INPUTS).detach().numpy()
    assert np.allclose(found, logits, atol=1e-5)


def test_safetensors_are_the_weights_by_name(run, tmp_path):
    found = load_file(export_model(run, "safetensors", tmp_path))
    trained = create_model("auto", data_spec(TaskSettings()), seed=0).state_dict()
    assert found.keys() == trained.keys()
    for name, weight in trained.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight), name


def test_a_program_that_gives_other_logits_is_not_kept(run, tmp_path):
    file = export_model(run, "onnx", tmp_path)
    other = create_model("auto", data_spec(TaskSettings()), seed=9).eval()
    with pytest.raises(ExportError, check=at("Sequential", remedy="export as safetensors")):
        _check(other, INPUTS, "onnx", file.read_bytes())


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("form", ["safetensors", "onnx", "torchscript"])
def test_where_there_is_no_room_the_earlier_export_stays_and_the_error_names_the_file(
    run, tmp_path, form
):
    file = export_model(run, form, tmp_path)
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            export_model(run, form, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(file)
    assert file.read_bytes() == before
    assert [*tmp_path.glob("*model*")] == [file]


def test_a_run_that_kept_no_model_has_none_to_export(run):
    (run.folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"of \[\]", check=at(run.folder)):
        run_to_export(run)


def test_of_an_unfinished_run_the_last_checkpoint_is_exported(run, checkpoint_of, tmp_path):
    (run.folder / "model.safetensors").unlink()
    weights = checkpoint_of(1)
    found = run_to_export(run)
    exported = load_file(export_model(found, "safetensors", tmp_path))
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert "`m.pt` is the global model after round 1" in model_card(found, "m.pt")
    assert "- 50.0 % on the server's test samples" in model_card(found, "m.pt")


def test_the_random_model_that_a_run_starts_from_is_not_exported(run, checkpoint_of):
    (run.folder / "model.safetensors").unlink()
    checkpoint_of(0)
    with pytest.raises(ExportError, match="no model yet", check=at(run.folder)):
        run_to_export(run)


def test_the_best_rounds_model_can_be_exported(finished_run, checkpoint_of, tmp_path):
    run = read_run(finished_run("102", accuracies=(0.1, 0.95, 0.9)))
    with pytest.raises(ExportError, match=r"of \[2\]", check=at(run.folder)):
        run_to_export(run, best_round=True)
    weights = checkpoint_of(1, run.folder)
    found = run_to_export(run, best_round=True)
    exported = load_file(export_model(found, "safetensors", tmp_path))
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert run_to_export(run).rows[-1]["round"] == 2


def test_the_card_tells_data_accuracy_privacy_settings_and_versions(run):
    card = model_card(run, "model.onnx")
    for said in (
        "`model.onnx` is the global model after round 2",
        "float32 (n, 1, 8, 8), pixels in [0, 1] less a mean of 0.3054, divided by 0.376",
        "- 90.0 % on the server's test samples, loss 0.100",
        "- By class: 0: 90.0 %.",
        "without differential privacy",
        "`strategy = 'fedhead'`",
        f"- torch {torch.__version__.partition('+')[0]}",
    ):
        assert said in card


def test_the_card_has_what_nodes_measured_and_the_architecture_that_auto_took(run):
    for row in run.rows:
        row |= {"node_accuracy": row["accuracy"], "accuracy": None, "loss": None}
    card = model_card(run, "model.onnx")
    assert "- 90.0 % on samples that nodes held out" in card
    assert run.settings["model"] == "auto"
    assert "`digits-cnn`" in card


def test_a_nodes_name_is_no_markup_in_the_card(run):
    run.settings["train"]["dp-noise"] = 1.0
    run.about["nodes"]["7"] = {"name": "<img src=x> [a](b)", "samples": 3}
    run.journal.append({"round": 1, "nodes": {"7": {"dp-epsilon": 2.5}}})
    card = model_card(run, "model.onnx")
    assert r"By node: \<img src=x\> \[a\](b): 2.5." in card


def test_the_card_of_a_table_has_all_digits_of_its_means(run):
    run.about["spec"] |= {"kind": "table", "mean": [1700000000123.25], "std": [17320.508]}
    card = model_card(run, "model.onnx")
    assert "values in float64 less a mean of 1700000000123.25, divided by 17320.508" in card


def test_the_card_says_how_near_virtual_images_came_and_that_raw_data_were_shared(finished_run):
    folder = finished_run(strategy="hfldd", hfldd__share_raw_data=True)
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"round": 1, "nodes": {"7": {"highest-cosine": 0.75}}}\n')
        file.write('{"round": 1, "nodes": {"8": {"highest-cosine": 0.5}}}\n')
    card = model_card(read_run(folder), "model.pt")
    assert "2 nodes sent virtual images to other nodes" in card
    assert "cosine of 0.750" in card
    assert "RAW DATA" in card
