"""An image's share in a change is found; what carries nothing tells nothing."""

import copy

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from benchmarks.parties import (
    classes_found,
    guessed_by,
    labels_view,
    models_view,
    share_solver,
    steps_alone,
    strongest,
)
from flwr_distill.distill.shadows import draw_members, with_canaries
from flwr_distill.task.datasets import Samples, load_dataset
from flwr_distill.task.models import create_model


def first_digits(count):
    """The data, the first images of it, and a new model for them."""
    data = load_dataset("digits")
    samples = data.train.to_samples(data.spec).subset(torch.arange(count))
    chosen = with_canaries(samples.inputs, samples.labels, 0, torch.Generator())
    return data, chosen, create_model("auto", data.spec, seed=0)


def test_the_share_of_each_image_in_a_change_is_found():
    alone = torch.randn(6, 400, generator=torch.Generator().manual_seed(0))
    members = torch.tensor([1.0, 0, 1, 1, 0, 0])
    shares = share_solver(alone)(members @ alone)
    np.testing.assert_allclose(shares, members.numpy(), atol=0.05)


def test_the_step_of_an_image_is_minus_its_gradient():
    _, chosen, model = first_digits(5)
    for step, image, label in zip(
        steps_alone(model, chosen), chosen.images, chosen.labels, strict=True
    ):
        loss = functional.cross_entropy(model(image[None]), label[None])
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        torch.testing.assert_close(step, -gradient, atol=1e-6, rtol=1e-4)


def test_more_rounds_show_more():
    data, chosen, start = first_digits(150)
    members = draw_members(24, chosen, np.random.default_rng(0))
    others = [data.test.to_samples(data.spec).subset(torch.arange(60))]
    one, five = (
        strongest(
            models_view("server", "models", start, chosen, others, rounds=rounds), chosen, members
        )
        for rounds in (1, 5)
    )
    assert five.curve.at_1pct.low > one.curve.at_1pct.high


def test_a_number_of_classes_is_guessed_where_it_shows_and_by_chance_where_not():
    counts = np.tile(np.arange(1.0, 11), 20)
    assert guessed_by(counts * 100, counts) == 1
    random = np.random.default_rng(0).random(len(counts))
    assert guessed_by(random, counts) < 0.3
    assert guessed_by(np.ones(len(counts)), counts) == 0.1


def test_what_is_seen_depends_on_the_node_s_images_alone():
    """So that sets differ by their members, and the model that a node begins with stays."""
    data, chosen, start = first_digits(60)
    before = copy.deepcopy(start.state_dict())
    samples = Samples(chosen.images, chosen.labels)
    one, other = (samples.subset(part) for part in torch.arange(60).chunk(2))
    for view in (
        models_view("server", "model", start, chosen),
        models_view("server", "mean", start, chosen, [other], mean=True),
        models_view("server", "models", start, chosen, [other], rounds=3),
        labels_view(start, chosen, data.spec),
    ):
        seen = view.of(one)
        assert seen.shape == (len(view.attacks), 60)
        np.testing.assert_array_equal(seen, view.of(one))
        assert not np.allclose(seen, view.of(other))
    assert all(torch.equal(own, start.state_dict()[name]) for name, own in before.items())


def test_an_attack_on_a_model_is_not_blind():
    _, chosen, start = first_digits(40)
    members = draw_members(24, chosen, np.random.default_rng(0))
    findings = strongest(models_view("server", "model", start, chosen), chosen, members)
    assert findings.curve.auc.low > 0.55


def test_the_classes_of_a_node_are_told_by_its_model_and_not_by_one_that_learned_nothing():
    data = load_dataset("digits")
    samples, held_back = (part.to_samples(data.spec) for part in (data.train, data.test))
    known = torch.cat([(held_back.labels == c).nonzero()[:5, 0] for c in range(10)])
    chosen = with_canaries(held_back.inputs[known], held_back.labels[known], 0, torch.Generator())
    start = create_model("auto", data.spec, seed=0)
    view = models_view("server", "model", start, chosen)
    assert classes_found(view, chosen, samples, data.spec, 20).auc.low > 0.9
    blind = view._replace(of=lambda own: np.zeros((2, len(known))))
    assert classes_found(blind, chosen, samples, data.spec, 20).auc.value == 0.5
