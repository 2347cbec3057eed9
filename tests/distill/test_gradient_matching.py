"""Gradient matching: loss and pixel gradient are those of plain loops; the distance falls."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from distill import DistillError, distiller
from distill import gradient_matching as gm
from distill.augmentation import Augmentation, draw_augmentation
from distill.gradient_matching import (
    distill_gm,
    draw_weights,
    gradient_distance,
    match_gradient,
    matching_step,
    real_gradient,
)


def naive_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The papers' double sum, one output node after the other, in Python's floats."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x.ndim == 1:
            continue
        for row, other in zip(x, y, strict=True):
            u, v = row.flatten().tolist(), other.flatten().tolist()
            dot = sum(p * q for p, q in zip(u, v, strict=True))
            total += 1 - dot / (sum(p * p for p in u) * sum(q * q for q in v)) ** 0.5
    return total


def naive_network(weights: list[Tensor]) -> nn.Sequential:
    """The ConvNet of the papers, from torch's own modules."""
    layers: list[nn.Module] = []
    for weight in weights[:-1]:
        conv = nn.Conv2d(weight.shape[1], len(weight), 3, padding=1, bias=False)
        conv.weight = nn.Parameter(weight)
        layers += [conv, nn.InstanceNorm2d(len(weight)), nn.ReLU(), nn.AvgPool2d(2)]
    dense = nn.Linear(weights[-1].shape[1], len(weights[-1]), bias=False)
    dense.weight = nn.Parameter(weights[-1])
    return nn.Sequential(*layers, nn.Flatten(), dense)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


SHAPES = [(5, 3, 3, 3), (5,), (4, 7), (4,)]


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_distance_is_the_papers_double_sum(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    assert float(gradient_distance(a, b)) == pytest.approx(naive_distance(a, b), rel=1e-5)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_distance_ignores_length_and_one_dimensional_parameters(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    changed = [scale * x if x.ndim > 1 else torch.randn_like(x) for x in b]
    torch.testing.assert_close(gradient_distance(a, b), gradient_distance(a, changed))
    assert float(gradient_distance(a, a)) == pytest.approx(0, abs=1e-5)
    assert float(gradient_distance(a, [-x for x in a])) == pytest.approx(18, rel=1e-5)


def test_a_row_of_zeros_counts_one_on_either_side_and_one_in_the_target_has_no_slope() -> None:
    a, b = torch.ones(5, 4), torch.ones(5, 4)
    a[0], b[1], b[2] = 0, 0, -1
    a[3], b[3] = 0, 0
    a.requires_grad_()
    for x, y in ((a, b), (b, a)):
        distance = gradient_distance([x], [y])
        assert float(distance.detach()) == pytest.approx(1 + 1 + 2 + 1 + 0, abs=1e-6)
    (slope,) = torch.autograd.grad(distance, a)
    assert bool(slope.isfinite().all())
    assert float(slope[[1, 3]].abs().max()) == 0


def test_a_unit_that_is_dead_counts_one_and_moves_no_pixel() -> None:
    """Its row of the gradient is zeros; the images become what they would without it."""
    generator = torch.Generator().manual_seed(0)
    small = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    large = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for big, own in zip(large.parameters(), small.parameters(), strict=True):
            big.zero_()[tuple(slice(n) for n in own.shape)] = own
        large[1].bias[5] = -100.0
        large[3].weight[:, 5] = 1.0
    labels = torch.arange(6) % 3
    unseen, noise = (torch.randn(6, 1, 4, 4, generator=generator) for _ in range(2))
    made: list[Tensor] = []
    distances: list[list[float]] = [[], []]
    for model, seen in zip((small, large), distances, strict=True):
        target = cross_entropy_gradient(model, unseen, labels)

        def note(step: int, steps: int, distance: float, seen: list[float] = seen) -> None:
            seen.append(distance)

        made.append(match_gradient(noise, labels, target, model, steps=5, progress=note))
    assert not torch.equal(made[0], noise)
    torch.testing.assert_close(made[1], made[0])
    assert distances[1] == pytest.approx([1 + distance for distance in distances[0]], rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9), (1, 16, 16)])
@pytest.mark.parametrize("chunk", [1, 2**11, 2**22])
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_pixel_gradient_equal_a_loop_over_classes(
    shape: tuple[int, int, int], chunk: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gm, "CHUNK_FLOATS", chunk)
    generator = torch.Generator().manual_seed(seed)
    classes, counts = [0, 2, 3], [7, 1, 4]
    real = [torch.randn(n, *shape, generator=generator) for n in counts]
    virtual = torch.randn(3, 3, *shape, generator=generator)
    weights = draw_weights(shape, 5, 8, generator)
    augments = [draw_augmentation(*shape[1:], generator) for _ in classes]
    loss, gradient = matching_step(virtual, real, classes, weights, augments)

    network = naive_network(weights)
    leaf = virtual.clone().requires_grad_()
    expected_loss = torch.zeros(())
    for own, others, label, augment in zip(leaf, real, classes, augments, strict=True):
        target, by_weights = (
            torch.autograd.grad(
                functional.cross_entropy(network(augment(x)), torch.full((len(x),), label)),
                list(network.parameters()),
                create_graph=True,
            )
            for x in (others, own)
        )
        for a, b in zip(by_weights, target, strict=True):
            for row, other in zip(a.flatten(1), b.detach().flatten(1), strict=True):
                expected_loss = expected_loss + 1 - row @ other / (row.norm() * other.norm())
    (expected,) = torch.autograd.grad(expected_loss, leaf)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    assert relative(gradient, expected) < 1e-5


def test_real_gradient_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, 3, 8, 8, generator=generator)
    weights = draw_weights((3, 8, 8), 4, 6, generator)
    augment = draw_augmentation(8, 8, generator)
    whole = real_gradient(weights, images, 1, augment)
    monkeypatch.setattr(gm, "CHUNK_FLOATS", 2 * 6 * 64)
    for part, expected in zip(real_gradient(weights, images, 1, augment), whole, strict=True):
        assert relative(part, expected) < 1e-5


def test_real_gradient_in_bfloat16_points_the_same_way() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 16, 16, generator=generator)
    weights = draw_weights((3, 16, 16), 4, 16, generator)
    augment = draw_augmentation(16, 16, generator)
    exact = real_gradient(weights, images, 1, augment)
    rounded = real_gradient(weights, images, 1, augment, torch.bfloat16)
    assert all(r.dtype == torch.float32 for r in rounded)
    assert float(gradient_distance(rounded, exact)) < 0.02 * sum(len(w) for w in weights)


def small_model(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(8 * 16, 3),
    )  # fmt: skip


def cross_entropy_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model).eval()
    loss = functional.cross_entropy(model(images), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.Identity()])
def test_refined_noise_has_the_gradient_of_the_unseen_images(norm: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    model = small_model(norm)
    labels = torch.arange(12) % 3
    unseen, noise = (torch.randn(12, 1, 8, 8, generator=generator) for _ in range(2))
    target = cross_entropy_gradient(model, unseen + labels[:, None, None, None], labels)
    seen: list[float] = []
    before = copy.deepcopy(model.state_dict())
    refined = match_gradient(
        noise, labels, target, model, progress=lambda step, steps, loss: seen.append(loss)
    )
    reached = cross_entropy_gradient(model, refined, labels)
    distances = [
        float(gradient_distance(list(g.values()), list(target.values())))
        for g in (cross_entropy_gradient(model, noise, labels), reached)
    ]
    assert seen[0] == pytest.approx(distances[0], rel=1e-4)
    assert distances[1] < 0.1 * distances[0]
    assert refined.shape == noise.shape
    assert not refined.requires_grad
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_weight_difference_serves_as_target() -> None:
    generator = torch.Generator().manual_seed(0)
    model = small_model(nn.GroupNorm(2, 8))
    labels = torch.arange(12) % 3
    unseen, noise = (torch.randn(12, 1, 8, 8, generator=generator) for _ in range(2))
    target = cross_entropy_gradient(model, unseen, labels)
    after = {name: w.detach() - 0.01 * target[name] for name, w in model.named_parameters()}
    difference = {name: w.detach() - after[name] for name, w in model.named_parameters()}
    one, two = (match_gradient(noise, labels, t, model, steps=5) for t in (target, difference))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-2)


def test_targets_that_do_not_fit_are_refused_with_the_remedy() -> None:
    model = nn.Linear(4, 3)
    images, labels = torch.randn(2, 4), torch.tensor([0, 1])
    for target, complaint in [
        ({"bias": torch.zeros(3)}, r"lacks \['weight'\]; name the gradients as in"),
        ({"weight": torch.zeros(3, 5)}, r"must have the weight's shape \(3, 4\), got \(3, 5\)"),
        ({"weight": torch.full((3, 4), torch.nan)}, "holds NaN or infinity"),
    ]:
        with pytest.raises(DistillError, match=complaint):
            match_gradient(images, labels, target, model)
    with pytest.raises(DistillError, match="weights of two or more dimensions"):
        match_gradient(images, labels, {}, nn.BatchNorm1d(4))


def stripes(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two classes of 8x8 images: horizontal and vertical stripes, with noise."""
    wave = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2)
    prototypes = torch.stack([wave[:, None].expand(8, 8), wave[None, :].expand(8, 8)])[:, None]
    labels = torch.arange(n) % 2
    return prototypes[labels] + 0.5 * torch.randn(n, 1, 8, 8, generator=generator), labels


def test_virtual_images_of_a_class_come_to_resemble_its_real_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = stripes(60, generator)
    data = distill_gm(
        images, labels, num_classes=9, per_class=4, steps=40, generator=generator, width=16
    )
    means = torch.stack([images[labels == c].mean(0).flatten() for c in (0, 1)])
    made = data.images.flatten(1)
    cosine = functional.cosine_similarity(made[:, None], means[None], dim=-1)
    assert data.labels.tolist() == [0] * 4 + [1] * 4
    assert torch.equal(cosine.argmax(1), data.labels)
    assert float(cosine.max(1).values.min()) > 0.3


def test_a_single_class_is_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = stripes(60, generator)
    losses: list[float] = []
    data = distill_gm(
        images[labels == 1],
        labels[labels == 1],
        num_classes=9,
        per_class=3,
        steps=40,
        generator=generator,
        progress=lambda step, steps, loss: losses.append(loss),
        width=16,
    )
    assert data.labels.tolist() == [1, 1, 1]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_a_fresh_network_serves_ten_updates_and_is_trained_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, labels = stripes(20, torch.Generator().manual_seed(0))
    filters: list[Tensor] = []

    def noting(virtual: Tensor, real: list[Tensor], classes: list[int], weights: list[Tensor],
               augments: list[Augmentation]) -> tuple[Tensor, Tensor]:  # fmt: skip
        filters.append(weights[0].detach().clone().flatten())
        return matching_step(virtual, real, classes, weights, augments)

    monkeypatch.setattr(gm, "matching_step", noting)
    generator = torch.Generator().manual_seed(1)
    distill_gm(images, labels, num_classes=2, per_class=2, steps=25, generator=generator, width=16)
    assert len(filters) == 25
    for before, after, number in zip(filters, filters[1:], range(1, 25), strict=False):
        alike = float(functional.cosine_similarity(before, after, dim=0))
        if number % 10 == 0:
            assert abs(alike) < 0.5
        else:
            assert 0.5 < alike < 1 - 1e-6
    first, second, third = filters[0], filters[10], filters[20]
    for one, other in ((first, second), (second, third), (first, third)):
        assert abs(float(functional.cosine_similarity(one, other, dim=0))) < 0.5


def test_found_by_name_and_the_same_generator_gives_the_same_result() -> None:
    images, labels = stripes(20, torch.Generator().manual_seed(0))
    one, two, other = (
        distiller("gm")(
            images,
            labels,
            num_classes=2,
            per_class=2,
            steps=12,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (5, 5, 6)
    )
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    assert (one.method, one.steps, one.seed, one.init) == ("gm", 12, 5, "class-stats")


@pytest.mark.parametrize(
    ("images", "changes", "complaint"),
    [
        (torch.randn(5, 1, 3, 8), {}, "at least 4 pixels a side"),
        (torch.randn(5, 1, 8, 8), {"width": 0}, "width must be at least 1, got 0"),
        (torch.full((5, 1, 8, 8), torch.nan), {}, "NaN or infinity in 5 of 5"),
        (torch.randn(5, 1, 8, 8), {"per_class": 0}, "per_class must be at least 1"),
    ],
)
def test_unusable_input_is_refused_with_the_remedy(
    images: Tensor, changes: dict[str, int], complaint: str
) -> None:
    asked = {"num_classes": 2, "per_class": 1, "steps": 1} | changes
    with pytest.raises(DistillError, match=complaint):
        distill_gm(
            images,
            torch.zeros(len(images)).long(),
            generator=torch.Generator(),
            **asked,  # type: ignore[arg-type]
        )
