"""FedAF's condensation: the loss is the paper's sum, with a distance that projections agree to."""

import math

import pytest
import torch
from torch import nn

from flwr_distill.distill import DistillError, perturbed_matching
from flwr_distill.distill.perturbed_matching import Outputs
from flwr_distill_baselines.fedaf import peer_matching
from flwr_distill_baselines.fedaf.peer_matching import Mixed, distill_with_peers
from tests.distill.builders import normal, seeded
from tests.distill.test_perturbed_matching import SHAPE, network, samples

CLASSES = 3
PEERS = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0], [-2.0, 0.5, 4.0]])
KNOWN = torch.tensor([True, False, True])


def made(model=None, peers=PEERS, known=KNOWN, **settings):
    images, labels = samples()
    options = {"num_classes": CLASSES, "per_class": 2, "steps": 3, "fresh": network, **settings}
    draws = seeded(4)
    return distill_with_peers(
        images, labels, model or network(), peers, known, generator=draws, **options
    )


def sliced_wasserstein(a, b, directions):
    """The squared distance of order 2 between two sets of points, by projections."""
    total = 0.0
    for direction in directions:
        direction = direction / direction.norm()
        one = sorted(float(point @ direction) for point in a)
        other = sorted(float(point @ direction) for point in b)
        total += sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) / len(one)
    return total / len(directions)


@pytest.fixture
def probes(monkeypatch):
    """The probes that virtual images are matched with, in place of the matching."""
    kept = []
    monkeypatch.setattr(
        perturbed_matching, "match_means", lambda virtual, probes, *rest: kept.extend(probes)
    )
    return kept


def test_the_loss_is_mean_features_of_mixtures_and_the_sliced_distance_to_the_peers(
    probes, monkeypatch
):
    monkeypatch.setattr(
        "flwr_distill.distill.perturbed_matching.draw_augmentation", lambda *given: nn.Identity()
    )
    model, (images, labels) = network(), samples()
    made(model, weight=0.7, gamma=0.6, steps=1)
    virtual = normal(2, 4, *SHAPE, seed=2)
    loss, gradient = probes[0].loss_and_gradient(virtual)
    seed = int(torch.randint(2**31, (), generator=after_the_start(images, labels)))
    random = network(seed)
    mixture = [0.6 * w + 0.4 * r for w, r in zip(model.parameters(), random.parameters())]  # noqa: B905
    directions = normal(20_000, CLASSES, seed=3)
    expected = 0.0
    for place, label in enumerate((0, 2)):
        means = []
        for batch in (images[labels == label], virtual[place]):
            means.append((batch.flatten(1) @ mixture[0].T + mixture[1]).relu().mean(0).detach())
        expected += float((means[0] - means[1]).square().sum())
        logits = model(virtual[place]).mean(0, keepdim=True)
        distance = sliced_wasserstein(logits, PEERS[label][None], directions)
        assert distance == pytest.approx(
            float((logits[0] - PEERS[label]).square().sum()) / CLASSES, rel=0.03
        )
        expected += 0.7 * float((logits[0] - PEERS[label]).square().sum()) / CLASSES
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert gradient.shape == virtual.shape


def after_the_start(images, labels):
    """The generator of `made` where the first mixture is drawn."""
    draws = seeded(4)
    peer_matching.start("class-stats", images, labels, 2, draws)
    return draws


def test_a_class_that_no_peer_tells_of_takes_the_logits_of_its_own_images(probes, monkeypatch):
    monkeypatch.setattr(
        "flwr_distill.distill.perturbed_matching.draw_augmentation", lambda *given: nn.Identity()
    )
    model, (images, labels) = network(), samples()
    made(model, known=torch.tensor([False, False, True]), steps=1)
    scale = math.sqrt(0.8 / CLASSES)
    logits = probes[0].means[:, -CLASSES:] / scale
    torch.testing.assert_close(logits[0], model(images[labels == 0]).mean(0).detach())
    torch.testing.assert_close(logits[1], PEERS[2])


def test_virtual_images_come_nearer_to_the_peers_logits():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]

    def distance(virtual):
        means = torch.stack([model(virtual.images[virtual.labels == c]).mean(0) for c in (0, 2)])
        return float((means - PEERS[[0, 2]]).square().sum())

    near, far = made(model, steps=120, weight=50.0), made(model, steps=120, weight=0.0)
    assert near.labels.tolist() == [0, 0, 2, 2]
    assert near.method == "fedaf"
    assert distance(near) < 0.5 * distance(far)
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_one_seed_gives_one_result():
    assert torch.equal(made().images, made().images)


def test_with_gamma_1_features_are_the_models_own(probes):
    model = network()
    made(model, gamma=1.0, steps=1)
    images = torch.randn(3, *SHAPE)
    features, logits = Outputs(model, "")(list(model.parameters()), images)
    seen = probes[0].network(images)
    assert isinstance(probes[0].network, Mixed)
    torch.testing.assert_close(seen[:, :8], features)
    torch.testing.assert_close(seen[:, 8:], math.sqrt(0.8 / CLASSES) * logits)


@pytest.mark.parametrize("settings", [{"per_class": 0}, {"steps": -1}, {"num_classes": 2}])
def test_arguments_that_cannot_be_are_refused(settings):
    with pytest.raises(DistillError):
        made(**settings)
