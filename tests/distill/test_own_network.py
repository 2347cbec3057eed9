"""A user's own network gives the features: found by name, its weights loaded, never trained."""

import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flwr_distill.distill import DistillError
from flwr_distill.distill.many import distill_many
from flwr_distill.distill.own_network import network_arguments, own_network
from tests.distill import builders
from tests.distill.builders import normal, seeded
from tests.errors import at

NETS = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5))

    def forward(self, images):
        return self.layers(images)

class Colour(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 3)

class Mean(nn.Module):
    def forward(self, images):
        return images.mean(0)

def broken():
    raise KeyError("no such layer")

def number():
    return 3

constant = 3
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    (tmp_path / "nets_of_ours.py").write_text(textwrap.dedent(NETS))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("nets_of_ours", None)


def real():
    images, labels = normal(24, 1, 8, 8, seed=1), torch.arange(24) % 2
    return images + labels[:, None, None, None] * torch.linspace(-1, 1, 8), labels


def distilled(method, steps=40, **network):
    return builders.distilled(method, *real(), seed=0, num_classes=2, steps=steps, **network)


def test_weights_come_from_the_file_and_the_network_stays_as_it_is(tmp_path):
    made = own_network("nets_of_ours:Encoder")
    assert isinstance(made.module, nn.Module)
    state = {name: torch.ones_like(value) for name, value in made.module.state_dict().items()}
    save_file(state, tmp_path / "encoder.safetensors")
    loaded = own_network("nets_of_ours:Encoder", str(tmp_path / "encoder.safetensors"))
    distilled("dm", steps=3, network=loaded)
    for name, value in loaded.module.state_dict().items():
        assert torch.equal(value, torch.ones_like(value)), name
    assert not loaded.module.training
    assert all(p.grad is None for p in loaded.module.parameters())
    images = real()[0]
    assert loaded(images).shape == (24, 3 * 6 * 6)


def test_without_a_file_every_node_has_the_same_network():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = own_network("nets_of_ours:Encoder")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    second = own_network("nets_of_ours:Encoder")
    images = real()[0]
    assert torch.equal(first(images), second(images))


def test_several_nodes_data_are_distilled_as_each_alone():
    network = network_arguments("dm", "nets_of_ours:Encoder")
    together = distill_many(
        "dm",
        [real(), real()],
        num_classes=2,
        per_class=2,
        steps=3,
        generators=[seeded() for _ in range(2)],
        **network,
    )
    for own in together:
        torch.testing.assert_close(own.images, distilled("dm", 3, **network).images)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_package.nets:Encoder", "'no_such_package.nets' cannot be imported.*its package"),
        ("nets_of_ours:Missing", "no attribute 'Missing'"),
        ("nets_of_ours:constant", "a class, got int"),
        ("nets_of_ours:number", "an nn.Module, got int"),
        ("nets_of_ours:broken", r"KeyError.*nets_of_ours.py, line \d+"),
    ],
)
def test_what_is_no_network_is_refused_by_name(name, complaint):
    with pytest.raises(DistillError, match=complaint, check=at("network", value=name)):
        own_network(name)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    file = tmp_path / "encoder.safetensors"
    for write, problem in (
        (lambda: None, "unreadable"),
        (lambda: file.write_bytes(b"a pickle, say"), "unreadable"),
        (lambda: save_file({"other": torch.zeros(2)}, file), "network 'nets_of_ours:Encoder'"),
    ):
        write()
        with pytest.raises(DistillError, match=problem, check=at("weights", value=str(file))):
            own_network("nets_of_ours:Encoder", str(file))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nets_of_ours:Colour", r"fails on images of shape \(1, 8, 8\): RuntimeError"),
        ("nets_of_ours:Mean", r"must give a row for each of \d+ images"),
    ],
)
def test_a_network_that_does_not_fit_the_images_is_refused(name, complaint):
    with pytest.raises(DistillError, match=complaint):
        distilled("dm", network=own_network(name))


@pytest.mark.parametrize("method", ["kip", "kip-negatives", "auto"])
def test_a_distiller_that_takes_no_network_says_so(method):
    with pytest.raises(DistillError, check=at("network", remedy="take dm")):
        network_arguments(method, "nets_of_ours:Encoder")
    with pytest.raises(DistillError, check=at("weights", value="weights.safetensors")):
        network_arguments("dm", "", "weights.safetensors")
    assert network_arguments(method, "") == {}
