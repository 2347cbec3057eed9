"""FedHEAD's models: published sizes, what they fit, and that padding says nothing."""

import pytest
import torch
from torch.nn import functional as F

from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.datasets.text import text_spec
from flwr_distill.task.models import ModelError, create_model, model_names
from tests.errors import at

CIFAR = DataSpec("some-set", (3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3)
TEXT = text_spec("some-texts", 4)
TABLE = DataSpec("some-table", (12, 1, 1), 5, (0.0,) * 12, (1.0,) * 12, kind="table")


@pytest.mark.parametrize(
    ("name", "spec", "count"),
    [
        ("resnet8", CIFAR, 75_290),
        ("resnet32", CIFAR, 464_154),
        ("mlp", TABLE, 12 * 200 + 200 + 3 * (200 * 200 + 200) + 200 * 5 + 5),
        # embedding, two directions of 4 gates (input, state, two biases), dense layer
        ("bilstm", TEXT, 2**14 * 100 + 2 * 4 * 128 * (100 + 128 + 2) + 256 * 4 + 4),
    ],
)
def test_parameter_counts_are_those_of_the_architecture(name, spec, count):
    assert sum(p.numel() for p in create_model(name, spec).parameters()) == count


def test_each_kind_of_data_is_offered_its_models_only():
    assert model_names(TEXT) == ["bilstm"]
    assert model_names(TABLE) == ["random-features", "mlp"]
    assert {"resnet8", "resnet32", "mlp", "digits-cnn"} <= set(model_names(CIFAR))
    assert "bilstm" not in model_names(CIFAR)
    with pytest.raises(ModelError, match="some-texts", check=at("model", value="resnet8")):
        create_model("resnet8", TEXT)


@pytest.mark.parametrize(("spec", "name"), [(TEXT, "bilstm"), (TABLE, "mlp")])
def test_auto_takes_the_model_for_the_kind_of_data(spec, name):
    assert type(create_model("auto", spec)) is type(create_model(name, spec))


def test_a_residual_block_is_the_papers_sum():
    block = create_model("resnet8", CIFAR, seed=0)[4].eval()  # 16 to 32 channels, halves the image
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    inner = block.second_norm(block.second(F.relu(block.first_norm(block.first(x)))))
    shortcut = torch.zeros(2, 32, 4, 4)
    for row in range(4):
        for column in range(4):
            shortcut[:, :16, row, column] = x[:, :, 2 * row, 2 * column]
    torch.testing.assert_close(block(x), F.relu(inner + shortcut))


def tokens(*texts):
    inputs = torch.zeros(len(texts), *TEXT.shape)
    for row, ids in enumerate(texts):
        inputs[row, 0, 0, : len(ids)] = torch.tensor(ids, dtype=torch.float32)
    return inputs


def test_a_text_is_classified_by_its_words_alone():
    """The same whatever texts are beside it, and equal to an LSTM run without padding."""
    model = create_model("bilstm", TEXT, seed=0).eval()
    alone, long = [5, 9, 16_383], list(range(1, 61))
    together = model(tokens(alone, long, []))
    states, _ = model.lstm(model.embedding(torch.tensor([alone])))
    torch.testing.assert_close(together[:1], model.dense(states.mean(dim=1)))
    torch.testing.assert_close(together[1:2], model(tokens(long)))
    assert together.isfinite().all()


def test_a_text_is_classified_on_a_gpu_as_on_the_cpu(virtual_device):
    """On a GPU, texts are not packed."""
    model = create_model("bilstm", TEXT, seed=0)
    inputs = tokens([5, 9, 16_383], range(1, TEXT.shape[-1] + 1), [], [7])
    expected = model(inputs)
    with virtual_device(1):
        actual = model.to("cuda")(inputs.to("cuda")).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_every_word_and_gate_takes_part_in_training():
    model = create_model("bilstm", TEXT, seed=0)
    F.cross_entropy(model(tokens([1, 2, 3], [4])), torch.tensor([0, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
