"""FedLGD's equations as printed, by settings: each equals a naive loop."""

import pytest
import torch
from torch import nn

from flwr_distill.distill.contrastive import mean_discrepancy, supervised_contrastive_loss
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.gradient_matching import gradient_distance, match_gradient
from tests.distill.builders import seeded

STEPS, EACH = 4, 3


def sgd(images, gradient_of):
    """Pixels after a few steps of SGD, learning rate 1 and momentum 0.5, by hand."""
    velocity = torch.zeros_like(images)
    for _ in range(STEPS):
        velocity = 0.5 * velocity + gradient_of(images.detach().requires_grad_())
        images = images - velocity
    return images.detach()


def test_eq_1_matches_the_mean_of_all_images_of_a_class_unaugmented():
    """More images than the default's cap of a class, and enough for groups."""
    images = torch.randn(420, 1, 8, 8, generator=seeded(1))
    labels = (torch.arange(420) >= 300).long()
    images[labels == 1] += 1
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
    begin = torch.randn(2 * EACH, 1, 8, 8, generator=seeded(2))

    def gradient_of(virtual):
        loss = torch.zeros(())
        for k in (0, 1):
            real = sum(network(x[None])[0] for x in images[labels == k]) / (labels == k).sum()
            made = sum(network(x[None])[0] for x in virtual[k * EACH : (k + 1) * EACH]) / EACH
            loss = loss + ((real.detach() - made) ** 2).sum()
        return torch.autograd.grad(loss, virtual)[0]

    asked = {"num_classes": 2, "per_class": EACH, "network": network, "initial_images": begin}
    printed = {"means_of": "classes", "optimizer": "sgd"}
    made = distill_dm(images, labels, steps=STEPS, generator=seeded(3), **asked, **printed)
    torch.testing.assert_close(made.images, sgd(begin, gradient_of), atol=1e-5, rtol=1e-4)
    usual = distill_dm(images, labels, steps=STEPS, generator=seeded(3), **asked, optimizer="sgd")
    assert (usual.images - made.images).abs().max() > 0.01


def test_the_server_moves_its_images_by_the_same_sgd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    images, labels = torch.randn(6, 1, 8, 8), torch.tensor([0, 0, 1, 1, 2, 2])
    weights = {name: w for name, w in model.named_parameters() if w.ndim > 1}
    target = {name: torch.randn_like(w) for name, w in weights.items()}

    def gradient_of(virtual):
        loss = nn.functional.cross_entropy(model(virtual), labels)
        own = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return torch.autograd.grad(gradient_distance(own, list(target.values())), virtual)[0]

    found = match_gradient(images, labels, target, model, steps=STEPS, optimizer="sgd")
    torch.testing.assert_close(found, sgd(images, gradient_of), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("labels", "anchors"), [([0, 0, 1, 1, 1], 5), ([0, 0, 1, 2, 3], 2)])
def test_eq_4_is_a_sum_over_the_minibatch(labels, anchors):
    features, labels = torch.randn(5, 7, generator=seeded()), torch.tensor(labels)
    mean = supervised_contrastive_loss(features, labels)
    total = supervised_contrastive_loss(features, labels, reduction="sum")
    torch.testing.assert_close(total, anchors * mean)


def test_the_discrepancy_is_that_of_class_means_where_both_sets_have_the_class():
    own, others = torch.randn(5, 3, generator=seeded(1)), torch.randn(4, 3, generator=seeded(2))
    labels, of_others = torch.tensor([0, 0, 2, 2, 4]), torch.tensor([2, 0, 2, 3])
    expected = (own[:2].mean(0) - others[1]).square().sum()
    expected = expected + (own[2:4].mean(0) - others[[0, 2]].mean(0)).square().sum()
    torch.testing.assert_close(mean_discrepancy(own, labels, others, of_others), expected)
