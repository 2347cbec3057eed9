"""Models of others: each kind works, or is refused before a run, with the layer and the remedy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_distill.client.training import epoch_batches, fit
from flwr_distill.protocol.arrays import arrays_of
from flwr_distill.server.export.description import Description
from flwr_distill.server.export.model import write_model
from flwr_distill.server.export.prediction import read_model
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.labels import LabelMap, positions
from flwr_distill.task.models import (
    ModelError,
    create_model,
    why_not_private,
    why_private_step_fails,
)
from tests.errors import at

SPEC = load_dataset("digits").spec


class Lazy(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.convolution = nn.LazyConv2d(4, 3)
        self.normalisation = nn.LazyBatchNorm2d()
        self.head = nn.LazyLinear(spec.num_classes)

    def forward(self, images):
        return self.head(F.relu(self.normalisation(self.convolution(images))).flatten(1))


class UnreachedLazy(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.head = nn.Linear(64, spec.num_classes)
        self.other = nn.LazyLinear(3)

    def forward(self, images):
        return self.head(images.flatten(1))


class BFloat16(UnreachedLazy):
    def __init__(self, spec):
        super().__init__(spec)
        self.other = nn.Linear(3, 3).to(torch.bfloat16)


class Complex(UnreachedLazy):
    def __init__(self, spec):
        super().__init__(spec)
        self.other = nn.Linear(3, 3).to(torch.complex64)


class NoStatistics(nn.Sequential):
    def __init__(self, spec):
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        super().__init__(nn.Flatten(), nn.Linear(64, 16), norm, nn.Linear(16, spec.num_classes))


class Squeeze(nn.Module):
    """Pools to (n, 4, 1, 1), and drops all dimensions of 1, with a batch of one that one too."""

    def __init__(self, spec):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, spec.num_classes)

    def forward(self, images):
        return self.head(F.adaptive_avg_pool2d(self.convolution(images), 1).squeeze())


class OnlyPairs(nn.Sequential):
    def __init__(self, spec):
        super().__init__(nn.Flatten(), nn.Linear(64, spec.num_classes))

    def forward(self, images):
        if len(images) == 1:
            raise RuntimeError("too few\nimages")
        return super().forward(images)


class SoftmaxLayer(nn.Sequential):
    def __init__(self, spec):
        super().__init__(nn.Flatten(), nn.Linear(64, spec.num_classes), nn.Softmax(1))


class Softmax(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.head = nn.Linear(64, spec.num_classes)

    def forward(self, images):
        return self.head(images.flatten(1)).softmax(1)


class LogSoftmax(Softmax):
    def forward(self, images):
        return F.log_softmax(self.head(images.flatten(1)), 1)


class Tied(nn.Module):
    """Two layers share their weight."""

    def __init__(self, spec):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, spec.num_classes)

    def forward(self, images):
        return self.head(F.relu(self.second(F.relu(self.first(images.flatten(1))))))


class Unused(UnreachedLazy):
    def __init__(self, spec):
        super().__init__(spec)
        self.other = nn.Linear(3, 3)


def create(cls, seed=0):
    return create_model(f"{__name__}:{cls.__name__}", SPEC, seed)


@pytest.mark.parametrize(
    ("cls", "named"),
    [
        (BFloat16, r"'other\.weight' has type bfloat16.*float32"),
        (Complex, r"'other\.weight' has type complex64.*float32"),
        (UnreachedLazy, r"'other\.weight' is lazy.*nn\.Linear"),
        (NoStatistics, r"layer '2', a BatchNorm1d.*track_running_stats=True"),
        (Squeeze, r"layer 'head' gets .* 1 dim.* 2.*flatten"),
        (OnlyPairs, r"RuntimeError: too few images"),
        (SoftmaxLayer, r"probabilities.*logits.*layer '2'"),
        (Softmax, r"probabilities.*logits.*Softmax\.forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_would_fail_later_is_refused_with_its_layer_and_the_remedy(cls, named):
    name = f"{__name__}:{cls.__name__}"
    with pytest.raises(ModelError, match=named, check=at("model", value=name)) as error:
        create(cls)
    assert "\n" not in str(error.value)


def test_lazy_layers_are_drawn_from_the_seed_and_train():
    first, again, other = (create(Lazy, seed) for seed in (1, 1, 2))
    for name, array in arrays_of(first).items():
        np.testing.assert_array_equal(array, arrays_of(again)[name])
    assert not torch.equal(first.head.weight, other.head.weight)
    samples = load_dataset("digits").train.to_samples(SPEC)
    generator = torch.Generator().manual_seed(0)
    batches = epoch_batches(samples.labels, 64, generator)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    assert fit(first, samples, batches, optimizer).accuracy > 0.5


@pytest.mark.parametrize("cls", [Lazy, Tied, LogSoftmax], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("form", ["onnx", "torchscript"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
def test_models_that_are_accepted_are_exported_and_predict_one_sample(cls, form, tmp_path):
    model = create(cls).eval()
    spec = replace(SPEC, labels=LabelMap(positions(SPEC.num_classes)))
    description = Description(f"{__name__}:{cls.__name__}", spec)
    suffix = {"onnx": "model.onnx", "torchscript": "model.pt"}[form]
    file = write_model(model.state_dict(), description, form, tmp_path / suffix)
    images = torch.rand(1, *SPEC.shape)
    with torch.no_grad():
        expected = model(images)
        assert torch.allclose(read_model(file).logits(images), expected, atol=1e-4)


def test_a_step_of_dp_sgd_is_tried_beforehand():
    assert why_private_step_fails(create(Tied), SPEC) == ""
    assert "'other.weight'" in why_private_step_fails(create(Unused), SPEC)
    model = nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(64, 10))
    before = torch.get_rng_state()
    why_private_step_fails(model, SPEC)
    assert torch.equal(torch.get_rng_state(), before)


class OwnStatistics(nn.Module):
    """Batch normalisation written by hand: no layer's type shows it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, features):
        if self.training:
            self.mean.lerp_(features.detach().mean(0), 0.1)
        return features - self.mean


class Centred(nn.Module):
    def forward(self, features):
        return features - features.mean(0) if self.training else features


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(16, affine=False), "layer '2', a BatchNorm1d,"),
        (type("Renamed", (nn.BatchNorm1d,), {})(16), "layer '2', a Renamed,"),
        (OwnStatistics(), "buffer '2.mean' follows the samples"),
        (Centred(), "depends on the others of the minibatch"),
    ],
    ids=["without weights", "subclass", "own statistics", "centred"],
)
def test_what_lets_samples_past_the_clip_is_refused(layer, named):
    """Opacus passed each: it asks layers that have weights, and those by their exact type."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), layer, nn.Linear(16, SPEC.num_classes))
    assert named in (why_not_private(model) or why_private_step_fails(model, SPEC))


def test_a_buffer_that_counts_steps_and_frozen_statistics_are_no_leak():
    class Counted(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, images):
            self.steps += 1
            return super().forward(images)

    model = Counted(nn.Flatten(), nn.Dropout(), nn.Linear(64, SPEC.num_classes))
    assert "follows" not in why_private_step_fails(model, SPEC)
    frozen = nn.BatchNorm1d(64).requires_grad_(requires_grad=False)
    frozen.train = lambda mode=True: frozen
    frozen.training = False
    model = nn.Sequential(nn.Flatten(), frozen, nn.Linear(64, SPEC.num_classes))
    assert not why_not_private(model)
    assert not why_private_step_fails(model, SPEC)
