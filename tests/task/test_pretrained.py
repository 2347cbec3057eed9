"""Networks of timm, torchvision and one's own, by ``backbone.network``."""

from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torch import nn
from torchvision.models import get_model

from flwr_distill.task.backbones import Frozen, fingerprint, whole_state
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import ModelError, create_model, model_of
from flwr_distill.task.settings import TaskSettings
from tests.errors import at

COLOUR = DataSpec("some", (3, 32, 32), 10, (0.4, 0.5, 0.6), (0.2, 0.2, 0.25))
GREY = DataSpec("grey", (1, 28, 28), 10, (0.1,), (0.3,))
TIMM = "timm:test_vit"  # 0.3 million weights; it takes images of 160 pixels


def built(spec=COLOUR, seed=0, **settings):
    config = {f"backbone.{key.replace('_', '-')}": value for key, value in settings.items()}
    return model_of(TaskSettings.from_run_config(config), spec, seed=seed)


class Means(nn.Module):
    """Features that tell how the network was shown an image: its channels' means, and its side."""

    def forward(self, images):
        side = torch.full((len(images), 1), float(images.shape[-1]))
        return torch.cat([images.mean((2, 3)), side], 1)


def shown(model, pixels):
    """What the network is shown of pixels in [0, 1] of `COLOUR`."""
    seen = []
    hook = model.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (COLOUR.mean, COLOUR.std))
    model.eval()((pixels - mean) / std)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
def test_a_network_of_timms_sees_images_as_its_own_transform_shows_them(name):
    model = built(network=f"timm:{name}", size=160)
    assert isinstance(model, Frozen)
    config = resolve_data_config(model=timm.create_model(name, num_classes=0))
    transform = create_transform(**{**config, "crop_pct": 1.0})  # of images as Pillow has them
    pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(0))
    image = pixels.byte().numpy()
    expected = transform(Image.fromarray(image))[None]
    found = shown(model, torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
    assert found.shape == expected.shape == (1, 3, 160, 160)
    # Pillow rounds to 1 in 255 and cuts off what bicubic overshoots, and its cubic is another.
    assert (found - expected).abs().mean() < 0.1
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.995


def test_features_are_those_of_timm_with_weights_from_its_file(tmp_path):
    torch.manual_seed(1)  # not that of the run
    source, file = timm.create_model("test_vit"), tmp_path / "vit.safetensors"
    save_file(source.state_dict(), file)  # with the head of its own classes
    model = built(network=TIMM, weights=str(file))
    oracle = timm.create_model("test_vit", num_classes=0).eval()
    oracle.load_state_dict({n: v for n, v in source.state_dict().items() if "head." not in n})
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = nn.functional.normalize(oracle(shown(model, pixels)))
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (COLOUR.mean, COLOUR.std))
    torch.testing.assert_close(model.features((pixels - mean) / std), expected)
    assert fingerprint(model) != fingerprint(built(network=TIMM))


def test_a_network_of_torchvisions_takes_its_published_weights_from_a_file(tmp_path):
    name, file = "mobilenet_v3_small", tmp_path / "network.safetensors"
    torch.manual_seed(1)  # not that of the run
    source = get_model(name, weights=None)
    save_file(source.state_dict(), file)  # with the old head
    named = {"network": f"torchvision:{name}"}
    model, again = (built(**named, weights=str(file)) for _ in range(2))
    own = source.state_dict()
    assert all(torch.equal(w, own[n]) for n, w in model.network.state_dict().items())
    assert fingerprint(model) == fingerprint(again) != fingerprint(built(**named))


def test_files_without_counts_of_batches_fit_as_those_of_torchvisions_resnets(tmp_path):
    """The ResNets that it publishes are older than this count, which nothing reads here."""
    source, file = get_model("resnet18", weights=None), tmp_path / "network.safetensors"
    with torch.no_grad():
        source.bn1.running_mean.fill_(0.5)
    own = source.state_dict()
    published = {n: v for n, v in own.items() if not n.endswith("num_batches_tracked")}
    assert len(published) == 102 < len(own)
    save_file(published, file)
    found = built(network="torchvision:resnet18", weights=str(file)).network.state_dict()
    assert all(torch.equal(found[n], v) for n, v in published.items() if n in found)
    save_file({n: v for n, v in published.items() if n != "bn1.running_mean"}, file)
    with pytest.raises(ModelError, match=r"is missing 'bn1\.running_mean'"):
        built(network="torchvision:resnet18", weights=str(file))


def test_a_network_of_torchvisions_sees_what_its_weights_were_trained_on_and_has_no_old_head():
    model = built(network="torchvision:mobilenet_v3_small")
    assert model.head.in_features == 1024
    assert isinstance(model.network.classifier[3], nn.Identity)
    imagenet = (torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225)))
    expected = ((0.5 - imagenet[0]) / imagenet[1]).reshape(1, 3, 1, 1).expand(1, 3, 128, 128)
    found = shown(model, torch.full((1, 3, 32, 32), 0.5))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    model.thaw("last-block")
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert "network.features.12.0.weight" not in trained
    assert "network.classifier.0.weight" in trained


def test_settings_come_before_metadata():
    wanted = {"size": 96, "mean": "0.1,0.2,0.3", "std": "0.5", "interpolation": "nearest"}
    model = built(network="timm:test_resnet", **wanted)
    pixels = torch.rand(1, 3, 32, 32)
    expected = (pixels - torch.tensor((0.1, 0.2, 0.3)).reshape(3, 1, 1)) / 0.5
    expected = expected.repeat_interleave(3, 2).repeat_interleave(3, 3)
    torch.testing.assert_close(shown(model, pixels), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("network", "blocks"),
    [
        ("timm:vit_tiny_patch16_224", "blocks.11"),  # a normalisation follows
        ("timm:test_convnext", "stages.3"),
        ("timm:test_efficientnet", "conv_head"),
        ("torchvision:densenet121", "features.denseblock4"),
        ("torchvision:resnet18", "layer4"),
    ],
)
def test_the_last_block_is_no_normalisation_alone_and_not_nearly_all_of_the_network(
    network, blocks
):
    model = built(network=network, trains="last-block")
    trained = [n for n, w in model.network.named_parameters() if w.requires_grad]
    matrices = [n for n in trained if model.network.get_parameter(n).ndim > 1]
    assert matrices
    assert all(name.startswith(f"{blocks}.") for name in matrices)
    assert list(model.network.state_dict())[-1].rpartition(".")[0] == trained[-1].rpartition(".")[0]


def test_a_network_of_ones_own_sees_the_runs_images_unless_settings_say_otherwise():
    network = f"{__name__}:Means"
    plain = built(GREY, network=network)
    assert plain.head.in_features == 2
    scaled = built(GREY, network=network, size=64, mean="0.5,0.5,0.5", std="0.5")
    assert scaled.head.in_features == 4  # a grey image in three channels
    white = (torch.ones(1, 1, 28, 28) - GREY.mean[0]) / GREY.std[0]
    found = scaled.network(shown_grey(scaled, white))
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0, 1.0, 64.0]]), atol=1e-5, rtol=0)


def shown_grey(model, inputs):
    seen = []
    hook = model.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(inputs)
    hook.remove()
    return seen[0]


def test_large_images_shrink_without_aliasing():
    """Stripes of one pixel become grey, and not other stripes."""
    large = replace(COLOUR, shape=(3, 512, 512))
    model = built(large, network="timm:test_resnet")
    stripes = torch.zeros(1, 3, 512, 512)
    stripes[..., ::2] = 1.0
    seen = shown(model, stripes)
    assert seen.shape[-1] == 160
    assert seen.abs().max() < 0.2  # 0.5 is 0 after normalisation, black and white are -1 and 1


def test_transformers_take_another_size_where_timm_can_interpolate_their_positions(tmp_path):
    source, file = timm.create_model("test_vit"), tmp_path / "vit.safetensors"
    save_file(source.state_dict(), file)
    assert shown(built(network=TIMM), torch.rand(1, 3, 32, 32)).shape[-1] == 160
    small = built(network=TIMM, size=64, weights=str(file))
    assert shown(small, torch.rand(1, 3, 32, 32)).shape[-1] == 64


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"network": "timm:no_such_net"}, at("backbone.network")),
        ({"network": "timm:resnet18.no_such_tag"}, at("backbone.network")),
        ({"network": "torchvision:no_such_net"}, at("backbone.network")),
        ({"network": "no_such_package:Network"}, at("backbone.network")),
        ({"network": f"{__name__}:shown"}, at("backbone.network")),  # a function of two arguments
        ({"network": TIMM, "size": 63}, at("backbone.network")),  # no multiple of its patches
        ({"network": "torchvision:vit_b_16", "size": 64}, at("backbone.size", value=64)),
    ],
)
def test_a_network_that_cannot_be_built_is_an_error_that_names_the_setting(settings, where):
    with pytest.raises(ModelError, check=where):
        built(**settings)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_packages_network_as_a_model_is_an_error_that_names_the_right_setting(name):
    with pytest.raises(ModelError, check=at("model", value=name)) as caught:
        create_model(name, GREY)
    assert f'backbone.network to "{name}"' in caught.value.remedy


def test_only_networks_of_the_package_are_built_and_none_is_downloaded(monkeypatch):
    """timm takes names of files and of networks on a server, too."""

    def create(*_, **__):
        raise AssertionError("timm was asked to build it")

    monkeypatch.setattr(timm, "create_model", create)
    for name in ("hf_hub_model", "hf-hub", "local-dir"):
        with pytest.raises(ModelError, check=at("backbone.network", value=f"timm:{name}")):
            built(network=f"timm:{name}")


def test_timm_that_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    remedy = "pip install 'flwr-distill[timm]'"
    with pytest.raises(ModelError, check=at("backbone.network", remedy=remedy)):
        built(network=TIMM)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"network": "resnet18"}, "backbone.network"),
        ({"network": "timm:hf-hub:a/b"}, "backbone.network"),
        ({"mean": "0.5"}, "backbone.mean"),
        ({"network": TIMM, "mean": "0.5,0.5"}, "backbone.mean"),
        ({"network": TIMM, "mean": "0.5,half,0.5"}, "backbone.mean"),
        ({"network": TIMM, "std": "0,0.5,0.5"}, "backbone.std"),
        ({"network": TIMM, "std": "nan"}, "backbone.std"),
        ({"network": TIMM, "interpolation": "cubic"}, "backbone.interpolation"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, where):
    with pytest.raises(ValueError, check=at(where)):
        built(**settings)


def test_a_model_and_a_network_cannot_both_be_named():
    task = TaskSettings.from_run_config({"model": "mlp", "backbone.network": TIMM})
    with pytest.raises(ModelError, check=at("model", value="mlp")):
        model_of(task, COLOUR)


def test_networks_take_images_alone():
    with pytest.raises(ModelError, check=at("backbone.network")):
        built(replace(COLOUR, shape=(8, 1, 1), mean=(0.0,), std=(1.0,), kind="table"), network=TIMM)


@pytest.mark.parametrize(
    "network", ["timm:test_vit", "timm:test_convnext", "timm:test_efficientnet"]
)
def test_low_rank_updates_of_other_architectures_send_little_and_come_from_the_seed(network):
    first, again = (built(network=network, trains="lora", rank=2) for _ in range(2))
    assert fingerprint(first) == fingerprint(again)
    assert fingerprint(built(seed=1, network=network, trains="lora", rank=2)) != fingerprint(first)
    sent, whole = (
        sum(weight.numel() for weight in state.values())
        for state in (first.state_dict(), whole_state(first))
    )
    assert sent < 0.05 * whole
    plain = built(network=network)
    images = torch.randn(2, *COLOUR.shape)
    torch.testing.assert_close(first.features(images), plain.features(images))
    own = whole_state(first)
    rebuilt = built(seed=3, network=network, trains="lora", rank=2)
    rebuilt.load_state_dict(own)  # a file that stands alone
    assert torch.equal(rebuilt.eval()(images), first.eval()(images))


def test_the_models_name_is_no_longer_that_of_a_network():
    with pytest.raises(ModelError, check=at("model")):
        create_model("torchvision:resnet18", COLOUR)
