"""Matching around a model: the loss is the paper's sum, weights stay in the ball."""

import pytest
import torch
from torch import nn

from flwr_distill.distill import DistillError
from flwr_distill.distill.distribution_matching import Probe, real_means
from flwr_distill.distill.perturbed_matching import Outputs, Perturbed, distill_around, perturbed
from tests.distill.builders import seeded

SHAPE = (1, 6, 6)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def plain(images):
    return images


def samples(classes=(0, 2), each=20, seed=1):
    generator = seeded(seed)
    labels = torch.tensor(classes).repeat_interleave(each)
    images = torch.randn(len(labels), *SHAPE, generator=generator) + labels[:, None, None, None]
    return images, labels


def made(model=None, **settings):
    images, labels = samples()
    options = {"num_classes": 3, "per_class": 2, "steps": 3, **settings}
    draws = seeded(4)
    return distill_around(images, labels, model or network(), generator=draws, **options)


@pytest.mark.parametrize("radius", [0.5, 5.0])
def test_a_perturbed_model_lies_on_the_ball_and_a_wide_ball_does_not_pull_it_back(radius):
    model, draws = network(), seeded()
    near = perturbed(model, radius, draws)
    moved = [w - p.detach() for w, p in zip(near, model.parameters(), strict=True)]
    assert float(sum(m.square().sum() for m in moved)) ** 0.5 == pytest.approx(radius, rel=1e-4)
    far = perturbed(model, 1e6, draws)
    noise = torch.cat([(w - p.detach()).flatten() for w, p in zip(far, model.parameters())])  # noqa: B905
    assert float(noise.std()) == pytest.approx(1, abs=0.1)


def test_the_loss_is_the_papers_sum_over_classes_of_features_and_logits():
    model, (images, labels) = network(), samples()
    weights = perturbed(model, 2.0, seeded())
    probe_of = Perturbed(Outputs(model, ""), weights)
    means = real_means(probe_of, plain, images, [20, 20])
    virtual = torch.randn(2, 3, *SHAPE)
    loss, gradient = Probe(probe_of, plain, means).loss_and_gradient(virtual)
    first, bias, last, last_bias = weights

    def features(batch):
        return (batch.flatten(1) @ first.T + bias).relu()

    leaf, expected = virtual.clone().requires_grad_(), 0.0
    for place, label in enumerate((0, 2)):
        real, own = features(images[labels == label]), features(leaf[place])
        expected = expected + (real.mean(0) - own.mean(0)).square().sum()
        logits = [h @ last.T + last_bias for h in (real, own)]
        expected = expected + (logits[0].mean(0) - logits[1].mean(0)).square().sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0])


def test_virtual_images_of_the_classes_present_come_nearer():
    losses, model = [], network()
    before = [p.detach().clone() for p in model.parameters()]
    virtual = made(model, steps=120, progress=lambda step, steps, loss: losses.append(loss))
    assert virtual.labels.tolist() == [0, 0, 2, 2]
    assert virtual.images.shape == (4, *SHAPE)
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_one_seed_gives_one_result():
    assert torch.equal(made().images, made().images)


def test_the_models_hook_is_not_left_behind():
    model = network()
    made(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("settings", [{"per_class": 0}, {"steps": -1}, {"num_classes": 2}])
def test_arguments_that_cannot_be_are_refused(settings):
    with pytest.raises(DistillError):
        made(**settings)
