"""KIP: the written-out gradient is autograd's, and the images it makes can be learned from."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from flwr_distill.distill import DistillError, distill_kip, kip
from flwr_distill.distill.kip import (
    DESCENT,
    VARIANTS,
    Descent,
    kip_gradient,
    negatives,
    shuffled,
)
from flwr_distill.distill.many import distill_many
from tests.distill.builders import distilled, labelled, naive_ntk, normal, seeded


def naive_loss(virtual, y_s, real, y_t, depth, descent=DESCENT):
    """HFLDD's eq. 1, divided by the number of targets."""
    K_ss = naive_ntk(virtual, virtual, depth, same=True)
    ridge = descent.ridge * torch.eye(len(virtual), dtype=virtual.dtype)
    ridge = ridge * K_ss.diagonal().mean() if descent.relative else ridge
    weights = torch.linalg.solve(K_ss + ridge, y_s)
    predicted = naive_ntk(real, virtual, depth, same=False) @ weights
    return 0.5 * (y_t - predicted).square().sum() / len(real)


def note_loss(losses, step, steps, loss):
    losses.append(loss)


def many(name, sets, **options):
    generators = [seeded(i) for i in range(len(sets))]
    few = {"num_classes": 4, "per_class": 2, "steps": 3}
    return distill_many(name, sets, generators=generators, **few, **options)


def problem(n, m, d, seed=0):
    generator = seeded(seed)
    shapes = [(n, d), (n, 3), (m, d), (m, 3)]
    virtual, y_s, real, y_t = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return virtual, y_s, real, y_t


@pytest.mark.parametrize(("n", "m", "d"), [(1, 5, 4), (12, 30, 20), (20, 10, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "descent", [DESCENT, Descent(ridge=0.5), Descent(ridge=0.5, relative=False)]
)
def test_gradient_equals_autograd(n, m, d, dtype, tolerance, descent):
    virtual, y_s, real, y_t = problem(n, m, d)
    virtual.requires_grad_()
    expected_loss = naive_loss(virtual, y_s, real, y_t, depth=3, descent=descent)
    (expected,) = torch.autograd.grad(expected_loss, virtual)
    points = (x.detach().to(dtype) for x in (virtual, y_s, real, y_t))
    loss, gradient = kip_gradient(*points, descent=descent)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=tolerance)
    assert float((gradient - expected).norm() / expected.norm()) < tolerance


def test_leading_dimensions_are_separate_problems():
    singles = [problem(6, 15, 10, seed) for seed in range(3)]
    losses, gradients = kip_gradient(*(torch.stack(x) for x in zip(*singles, strict=True)))
    for i, single in enumerate(singles):
        loss, gradient = kip_gradient(*single)
        torch.testing.assert_close(losses[i], loss)
        torch.testing.assert_close(gradients[i], gradient)


def test_nearly_coinciding_points_are_handled_in_float64():
    virtual, y_s, real, y_t = (x.float() for x in problem(60, 50, 30))
    virtual = virtual[:1] + 1e-5 * virtual
    loss, gradient = kip_gradient(virtual, y_s, real, y_t)
    expected = kip_gradient(*(x.double() for x in (virtual, y_s, real, y_t)))
    assert gradient.dtype == torch.float32
    assert torch.equal(loss, expected.loss)
    assert torch.equal(gradient, expected.by_virtual.float())


def test_divergence_is_an_error_with_the_remedy():
    virtual, y_s, real, y_t = problem(3, 3, 3)
    with pytest.raises(DistillError, match="lower learning rate"):
        kip_gradient(virtual * torch.nan, y_s, real, y_t)


def blobs(generator):
    """Three classes of 6x6 images around smooth prototypes."""
    prototypes = torch.randn(3, 1, 3, 3, generator=generator)
    prototypes = functional.interpolate(prototypes, size=6, mode="bilinear")
    labels = torch.arange(120) % 3
    return prototypes[labels] + 0.5 * torch.randn(120, 1, 6, 6, generator=generator), labels


def test_regression_from_the_virtual_images_beats_their_start():
    generator = seeded()
    images, labels = blobs(generator)
    losses = []
    note = partial(note_loss, losses)
    data = distilled("kip", images, labels, num_classes=5, steps=60, progress=note)
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.images.shape == (6, 1, 6, 6)
    assert len(losses) == 60
    assert losses[-1] < 0.25 * losses[0]


def test_a_float32_step_agrees_with_eq_1_in_the_first_loss():
    """The targets are one-hot less 1 / num_classes, over all the task's classes."""
    images, labels = blobs(seeded(1))
    losses = []
    asked = {"per_class": 3, "steps": 1, "descent": Descent(learning_rate=0.0)}
    start = distilled(distill_kip, images, labels, progress=partial(note_loss, losses), **asked)

    def targets(y):
        return torch.eye(4, dtype=torch.float64)[y] - 0.25

    points, real = (x.flatten(1).double() for x in (start.images, images))
    expected = naive_loss(points, targets(start.labels), real, targets(labels), depth=3)
    assert losses[0] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_virtual_images_stay_within_the_pixel_values_of_their_own_node(name):
    """Two nodes of one size, which share the steps, but not a range."""
    generator = seeded()
    labels = torch.arange(30) % 3
    nodes = [
        low + (high - low) * torch.rand(30, 1, 8, 8, generator=generator)
        for low, high in ((0.2, 0.7), (-3.0, -1.0))
    ]
    sets = [(images, labels) for images in nodes]
    made = many(name, sets, init="noise")
    for images, virtual in zip(nodes, made, strict=True):
        assert virtual.initial_images.min() < images.min()
        assert virtual.initial_images.max() > images.max()
        assert float(virtual.images.min()) == float(images.min())
        assert float(virtual.images.max()) == float(images.max())


def test_negatives_keep_the_pixels_and_move_them():
    images = normal(3, 2, 9, 9)
    made = negatives(images, 50, seeded(1))
    assert made.shape == (50, 2, 9, 9)
    values = {tuple(image.flatten().sort().values.tolist()) for image in images}
    assert {tuple(image.flatten().sort().values.tolist()) for image in made} <= values
    same = [bool((image == images).flatten(1).all(1).any()) for image in made]
    assert not any(same)


def test_tiles_are_shuffled_and_a_remainder_stays():
    image = torch.arange(100.0).reshape(1, 1, 10, 10)
    cut = shuffled(image, seeded())
    assert torch.equal(cut[..., 8:, :], image[..., 8:, :])
    before, after = (
        set(map(tuple, x[0, 0, :8, :8].unfold(0, 2, 2).unfold(1, 2, 2).reshape(16, 4).tolist()))
        for x in (image, cut)
    )
    assert before == after


def test_images_that_are_not_square_are_turned_by_half():
    made = negatives(torch.randn(2, 1, 8, 12), 20, seeded())
    assert made.shape == (20, 1, 8, 12)


def test_each_step_predicts_a_minibatch_that_is_drawn_for_it(monkeypatch):
    drawn = []

    def spied(virtual, targets, real, real_targets, descent):
        drawn.append(real[0])
        return kip_gradient(virtual, targets, real, real_targets, descent=descent)

    monkeypatch.setattr(kip, "kip_gradient", spied)
    images, labels = normal(40, 1, 4, 4), torch.arange(40) % 2
    distilled(distill_kip, images, labels, num_classes=2, steps=3, descent=Descent(batch_size=10))
    assert [len(points) for points in drawn] == [10] * 3
    assert not torch.equal(drawn[0], drawn[1])


def test_the_learning_rate_is_the_descents():
    images, labels = normal(40, 1, 4, 4), torch.arange(40) % 2
    for rate in (0.1, 0.004):
        made = distilled(distill_kip, images, labels, num_classes=2, steps=1, descent=Descent(rate))
        moved = (made.images - made.initial_images).abs().median()
        assert float(moved) == pytest.approx(rate, rel=0.01)  # of Adam's first step


def test_with_negatives_kip_learns_what_a_single_class_looks_like():
    """Plain KIP is degenerate on one class; with negatives the images come near the class mean."""
    generator = seeded()
    prototype = torch.nn.functional.interpolate(
        torch.randn(1, 1, 3, 3, generator=generator), size=8, mode="bilinear"
    )
    images = 2 * prototype + 0.3 * torch.randn(80, 1, 8, 8, generator=generator)
    likeness = {}
    for name in ("kip", "kip-negatives"):
        asked = {"num_classes": 5, "per_class": 4, "steps": 80}
        data = distilled(name, images, torch.zeros(80).long(), seed=1, **asked)
        likeness[name] = torch.cosine_similarity(
            data.images.mean(0).flatten(), images.mean(0).flatten(), dim=0
        )
    assert likeness["kip-negatives"] > likeness["kip"] + 0.15


NODES = [(30, 3), (30, 1), (30, 3), (12, 3), (300, 1)]
SETS = [labelled(n, classes, seed) for seed, (n, classes) in enumerate(NODES)]


@pytest.mark.parametrize("formation", [1, 2])
@pytest.mark.parametrize("name", ["kip", "kip-negatives", "dm", "auto"])
def test_many_nodes_at_once_get_what_each_would_alone(name, formation):
    together = many(name, SETS, formation=formation)
    for i, (images, labels) in enumerate(SETS):
        alone = distilled(name, images, labels, seed=i, formation=formation)
        assert (together[i].method, together[i].seed) == (alone.method, i)
        assert together[i].formation == formation
        torch.testing.assert_close(together[i].images, alone.images, rtol=1e-3, atol=1e-3)
        assert torch.equal(together[i].labels, alone.labels)


def test_nodes_of_one_size_share_the_steps():
    steps = []
    many("kip", SETS[:3], progress=lambda step, total, loss: steps.append(step))
    assert steps == [1, 2, 3] * 2  # the two nodes of three classes together, and the other
