"""Models by name: sizes, seeds, what they fit, and plug-ins."""

import sys

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.datasets.text import text_spec
from flwr_distill.task.models import ModelError, architecture, create_model, last_dense, model_names
from tests.errors import at


def _spec(*shape, num_classes=10):
    return DataSpec("some-set", shape, num_classes, (0.5,) * shape[0], (0.5,) * shape[0])


DIGITS, USPS, MNIST, CIFAR = _spec(1, 8, 8), _spec(1, 16, 16), _spec(1, 28, 28), _spec(3, 32, 32)
LARGE = _spec(3, 64, 64)


def _num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "spec", "count"),
    [
        ("digits-cnn", DIGITS, 18_346),
        ("digits-cnn", USPS, 18_346),
        ("hfldd-mnist", MNIST, 44_426),
        ("hfldd-cifar10", CIFAR, 1_020_160),
        ("cadis-mnist", MNIST, 1_663_370),
        ("convnet3", CIFAR, 320_010),
        ("convnet3-gn", CIFAR, 320_010),
        ("resnet18", _spec(3, 64, 64, num_classes=1000), 11_689_512),
        ("mobilenetv2", _spec(3, 64, 64, num_classes=1000), 3_504_872),
        ("shufflenet", _spec(3, 64, 64, num_classes=1000), 2_278_604),
        # pytorchcv's shufflenet_g3_w1, for 1,000 classes
        ("shufflenet-v1", _spec(3, 64, 64, num_classes=1000), 1_865_728),
    ],
)
def test_parameter_counts_are_the_published_ones(name, spec, count):
    assert _num_parameters(create_model(name, spec)) == count


@pytest.mark.parametrize(
    ("name", "build", "stem"),
    [("resnet18", "resnet18", 64 * 3 * (7**2 - 3**2)), ("mobilenetv2", "mobilenet_v2", 0)],
)
def test_small_images_change_the_stem_of_torchvisions_networks_alone(name, build, stem):
    theirs = getattr(torchvision.models, build)(num_classes=10)
    assert _num_parameters(create_model(name, CIFAR)) == _num_parameters(theirs) - stem


def test_the_widths_of_hfldds_network_come_nearest_to_doubling():
    """Of all with 1,020,160 parameters, where batch norm has the biases of convolutions."""
    first, second, third = np.ogrid[8:128, 8:256, 8:400]
    narrow = 27 * first + 9 * (first**2 + first * second + second**2 + second * third + third**2)
    rest = 1_020_160 - 10 - narrow - 4 * (first + second + third)
    linear = 9 * third + 4 + 4 * 10  # of the last width: convolution, batch norm, dense layer
    last = (np.sqrt(linear**2 + 36 * rest.clip(0)) - linear) / 18
    last = np.rint(last).astype(int)
    fits = (9 * last**2 + linear * last == rest) & (first <= second) & (second <= third)
    rows = np.argwhere(fits & (third <= last)) + 8
    rows = np.column_stack([rows, [last[tuple(row - 8)] for row in rows]])
    from_doubling = np.square(np.diff(np.log2(rows)) - 1).sum(axis=1)
    assert len(rows) == 112
    layers = create_model("hfldd-cifar10", CIFAR).modules()
    widths = [layer.num_features for layer in layers if isinstance(layer, nn.BatchNorm2d)]
    assert widths[::2] == rows[from_doubling.argmin()].tolist()


@pytest.mark.parametrize("name", [n for n in model_names() if "bilstm" not in n])
def test_every_parameter_takes_part_in_training(name):
    spec = MNIST if name == "hfldd-mnist" else USPS
    model = create_model(name, spec, seed=0)
    inputs = torch.randn(4, *spec.shape, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 9])).backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
        if parameter.grad is None:
            continue  # frozen
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "shufflenet", "shufflenet-v1"])
def test_the_stem_keeps_the_size_of_small_images_only(name):
    def first_output_side(spec):
        model = create_model(name, spec).eval()
        first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        return first(torch.zeros(1, *spec.shape)).shape[-1]

    assert first_output_side(CIFAR) == 32
    assert first_output_side(LARGE) == 32


@pytest.mark.parametrize("name", ["digits-cnn", "resnet18"])
def test_weights_are_drawn_from_the_seed_or_without_one_from_the_global_generator(name):
    def weights(seed):
        return torch.cat([p.flatten() for p in create_model(name, DIGITS, seed).parameters()])

    before = torch.get_rng_state()
    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(weights(None), weights(None))


def test_a_model_that_does_not_fit_is_an_error_with_those_that_do():
    remedy = f"choose one of {', '.join(model_names(CIFAR))}"
    with pytest.raises(ModelError, check=at("model", value="hfldd-mnist", remedy=remedy)):
        create_model("hfldd-mnist", CIFAR)
    assert "hfldd-mnist" not in remedy


@pytest.mark.parametrize("short", [1, 4, 7, 8, 15])
def test_either_side_of_an_image_may_be_too_short_for_a_model(short):
    assert model_names(_spec(3, short, 32)) == model_names(_spec(3, 32, short))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Good(nn.Sequential):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__(nn.Flatten(), nn.LazyLinear(spec.num_classes))\n"
        "class Wrong(nn.Flatten):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__()\n"
        "class Narrow(nn.Linear):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__(3, spec.num_classes)\n"
        "def nothing(spec):\n"
        "    return None\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_models"
    sys.modules.pop("my_models", None)


def test_a_class_from_another_package_is_built_for_the_data(plugin):
    model = create_model(f"{plugin}:Good", DIGITS, seed=0)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_models:Wrong", r"shape \(2, 64\).*need \(2, 10\)"),
        ("my_models:Narrow", "cannot take images of 1x8x8"),
        ("my_models:nothing", "need a Module"),
        ("my_models:number", "need a function or class"),
        ("my_models:missing", "has no attribute 'missing'"),
        ("my_models:", "not of the form"),
        ("no_such_package.x:Model", r"'no_such_package\.x' cannot be imported"),
        ("lenet", "choose auto, efficientnet-lite0"),
    ],
)
def test_a_bad_name_or_plug_in_is_an_error(plugin, name, problem):
    with pytest.raises(ModelError, match=problem, check=at("model", value=name)):
        create_model(name, DIGITS)


@pytest.mark.parametrize("spec", [DIGITS, MNIST, CIFAR, LARGE], ids=lambda spec: str(spec.shape))
def test_every_model_that_is_offered_has_logits_from_its_last_dense_layer(spec):
    for name in model_names(spec):
        model = create_model(name, spec, seed=0)
        assert model.training
        outputs = []
        model.eval().get_submodule(last_dense(model)).register_forward_hook(
            lambda _module, _inputs, output, outputs=outputs: outputs.append(output)
        )
        logits = model(torch.rand(2, *spec.shape))
        torch.testing.assert_close(outputs[-1], logits)


def test_it_can_be_named_and_a_wrong_name_says_what_there_is():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert last_dense(model) == "1"
    assert last_dense(model, "0") == "0"
    with pytest.raises(ModelError, match=r"'2' is not .* it has 0, 1"):
        last_dense(model, "2")
    with pytest.raises(ModelError, check=at("Conv2d")):
        last_dense(nn.Conv2d(1, 1, 1))


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
        (
            "fedhead-bilstm",
            TEXT,
            2**14 * 32
            + 2 * 4 * 128 * (32 + 128 + 2)
            + 2 * 4 * 64 * (256 + 64 + 2)
            + (128 + 1) * 1024
            + (1024 + 1) * 512
            + (512 + 1) * 256
            + (256 + 1) * 128
            + (128 + 1) * 64
            + (64 + 1) * 4,
        ),
    ],
)
def test_parameter_counts_are_those_of_the_architecture(name, spec, count):
    assert sum(p.numel() for p in create_model(name, spec).parameters()) == count


def test_each_kind_of_data_is_offered_its_models_only():
    assert model_names(TEXT) == ["bilstm", "fedhead-bilstm"]
    assert model_names(TABLE) == ["random-features", "mlp"]
    assert {"resnet8", "resnet32", "mlp", "digits-cnn"} <= set(model_names(CIFAR))
    assert "bilstm" not in model_names(CIFAR)
    with pytest.raises(ModelError, match="some-texts", check=at("model", value="resnet8")):
        create_model("resnet8", TEXT)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (DIGITS, "digits-cnn"),
        (USPS, "digits-cnn"),
        (MNIST, "hfldd-mnist"),
        (CIFAR, "convnet3"),
        (_spec(3, 28, 28), "convnet3"),
        (TEXT, "bilstm"),
        (TABLE, "mlp"),
    ],
)
def test_auto_is_the_model_for_the_data(spec, name):
    assert architecture("auto", spec) == name
    assert architecture("resnet8", spec) == "resnet8"


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


def test_fedheads_network_for_texts_is_the_papers_layer_by_layer():
    """On each text alone, without padding, with PyTorch's own bidirectional layers."""
    model = create_model("fedhead-bilstm", TEXT, seed=0).eval()
    texts = [5, 9, 16_383], list(range(1, 61)), [7]
    for row, ids in zip(model(tokens(*texts)), texts, strict=True):
        states = model.embedding(torch.tensor([ids]))
        for own in (model.first, model.second):
            layer = nn.LSTM(states.shape[2], own.forwards.hidden_size, bidirectional=True)
            layer.batch_first = True
            behind = {f"{name}_reverse": w for name, w in own.backwards.state_dict().items()}
            layer.load_state_dict({**own.forwards.state_dict(), **behind})
            states, _ = layer(states)
        values = torch.stack([max(column) for column in states[0].T])
        *hidden, last = [layer for layer in model.dense if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in hidden] == [1024, 512, 256, 128, 64]
        for layer in hidden:
            values = (layer.weight @ values + layer.bias).clamp(min=0)
        torch.testing.assert_close(row, last(values), rtol=1e-5, atol=1e-6)
    assert model(tokens([])).isfinite().all()


@pytest.mark.parametrize("name", ["bilstm", "fedhead-bilstm"])
def test_a_text_is_classified_on_a_gpu_as_on_the_cpu(virtual_device, name):
    """On a GPU, texts are neither packed nor cut."""
    model = create_model(name, TEXT, seed=0)
    inputs = tokens([5, 9, 16_383], range(1, TEXT.shape[-1] + 1), [], [7])
    expected = model(inputs)
    with virtual_device(1):
        actual = model.to("cuda")(inputs.to("cuda")).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bilstm", "fedhead-bilstm"])
def test_every_word_and_gate_takes_part_in_training(name):
    model = create_model(name, TEXT, seed=0)
    F.cross_entropy(model(tokens([1, 2, 3], [4])), torch.tensor([0, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
