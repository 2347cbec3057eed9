"""DM: loss and pixel gradient are those of a plain loop over classes; one class is enough."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_distill.distill import DistillError, distill_dm
from flwr_distill.distill import distribution_matching as dm
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import Probe, alike, own_groups, real_means
from flwr_distill.distill.features import RandomConvNet
from tests.distill.builders import distilled, normal, seeded
from tests.errors import at


def naive_network(network, blocks=9):
    """The ConvNet of the papers, or its first blocks, from torch's own modules."""
    layers = []
    for weight in network.filters[:blocks]:
        conv = nn.Conv2d(weight.shape[1], len(weight), 3, padding=1, bias=False)
        conv.weight = nn.Parameter(weight)
        layers += [conv, nn.InstanceNorm2d(len(weight)), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9), (1, 28, 28)])
@pytest.mark.parametrize("chunk", [1, 2**10, 2**22])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_pixel_gradient_equal_a_loop_over_classes(shape, chunk, seed, monkeypatch):
    monkeypatch.setattr(dm, "CHUNK_FLOATS", chunk)
    monkeypatch.setattr(dm, "GRADIENT_FLOATS", chunk)
    generator = seeded(seed)
    counts, per_class, width = [7, 1, 4], 3, 8
    real = torch.randn(sum(counts), *shape, generator=generator)
    virtual = torch.randn(len(counts), per_class, *shape, generator=generator)
    network = RandomConvNet.draw(shape[0], min(shape[1:]), width, generator)
    augment = draw_augmentation(*shape[1:], generator)
    probe = Probe(network, augment, real_means(network, augment, real, counts))
    loss, gradient = probe.loss_and_gradient(virtual)

    features = naive_network(network)
    leaf = virtual.clone().requires_grad_()
    expected_loss = torch.zeros(())
    for c, own in enumerate(torch.split(real, counts)):
        distance = features(augment(own)).mean(0) - features(augment(leaf[c])).mean(0)
        expected_loss = expected_loss + distance.square().sum()
    (expected,) = torch.autograd.grad(expected_loss, leaf)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(("shape", "blocks"), [((1, 14, 14), 2), ((3, 16, 16), 3), ((2, 9, 20), 2)])
def test_features_of_all_depths_stand_side_by_side_and_count_alike(shape, blocks):
    generator = seeded()
    images = torch.randn(5, *shape, generator=generator)
    network = RandomConvNet.draw(shape[0], min(shape[1:]), 6, generator, all_depths=True)
    assert len(network.filters) == blocks
    by_depth = [
        functional.adaptive_avg_pool2d(block, [min(side, 8) for side in block.shape[2:]]).flatten(1)
        for depth in range(blocks)
        for block in [naive_network(network, depth + 1)[:-1](images)]
    ]
    expected = torch.cat([x / x.shape[1] ** 0.5 for x in by_depth], 1)
    torch.testing.assert_close(network(images), expected)


def stripes(n, generator):
    """Two classes of 8x8 images: horizontal and vertical stripes, with noise."""
    wave = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2)
    prototypes = torch.stack([wave[:, None].expand(8, 8), wave[None, :].expand(8, 8)])[:, None]
    labels = torch.arange(n) % 2
    return prototypes[labels] + 0.5 * torch.randn(n, 1, 8, 8, generator=generator), labels


def test_virtual_images_of_a_class_come_to_resemble_its_real_ones():
    generator = seeded()
    images, labels = stripes(60, generator)
    data = distill_dm(
        images, labels, num_classes=9, per_class=4, steps=120, generator=generator, width=16
    )
    means = torch.stack([images[labels == c].mean(0).flatten() for c in (0, 1)])
    made = data.images.flatten(1)
    cosine = nn.functional.cosine_similarity(made[:, None], means[None], dim=-1)
    assert data.labels.tolist() == [0] * 4 + [1] * 4
    assert torch.equal(cosine.argmax(1), data.labels)
    assert float(cosine.max(1).values.min()) > 0.3


def test_a_given_network_s_class_means_are_matched_from_given_images():
    """FedLGD's iterative distillation: the global extractor, and last time's virtual images."""
    generator = seeded()
    images = torch.randn(40, 1, 8, 8, generator=generator) + 1.0
    labels = torch.arange(40) % 2
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Tanh())
    before = [p.clone() for p in network.parameters()]
    begin = torch.randn(6, 1, 8, 8, generator=generator)
    asked = {"num_classes": 2, "per_class": 3, "network": network, "initial_images": begin}

    def distance(virtual):
        with torch.no_grad():
            means = [network(images[labels == c]).mean(0) for c in range(2)]
            found = network(virtual).reshape(2, 3, -1).mean(1)
        return float(sum((f - m).square().sum() for f, m in zip(found, means, strict=True)))

    made = distill_dm(images, labels, steps=60, generator=seeded(1), **asked)
    assert distance(made.images) < 0.5 * distance(begin)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))
    assert all(p.grad is None for p in network.parameters())
    with pytest.raises(DistillError, check=at("initial_images", value=(4, 1, 8, 8))):
        distill_dm(
            images, labels, generator=torch.Generator(), **(asked | {"initial_images": begin[:4]})
        )


def test_each_network_of_the_bank_is_matched_to_a_draw_of_its_own_of_at_most_256_images():
    """Plain images of 400 levels: an augmentation changes their scale, but not their places."""
    images = torch.arange(400.0)[:, None, None, None].expand(400, 1, 8, 8).contiguous() / 400
    seen = []

    def network(shown):
        if not shown.requires_grad:
            levels = shown.flatten(1).mean(1).sort().values
            seen.append((levels - levels[0]) / (levels[-1] - levels[0]))
        return shown.flatten(1)

    asked = {"per_class": 1, "steps": 6, "bank": 3, "network": network}
    distilled("dm", images, torch.zeros(400).long(), **asked)
    assert [len(levels) for levels in seen] == [256] * 3
    for i, levels in enumerate(seen):
        assert all(float((levels - other).abs().max()) > 0.01 for other in seen[:i])


@pytest.mark.parametrize(("n", "groups"), [(600, 10), (101, 2), (150, 3), (7, 1)])
def test_groups_share_out_all_images_evenly_and_look_alike(n, groups):
    generator = seeded(n)
    images = torch.randn(n, 1, 12, 12, generator=generator)
    images += torch.linspace(-3, 3, n)[torch.randperm(n, generator=generator), None, None, None]
    made = [images[places] for places in alike(images, groups)]
    assert len(made) == groups
    assert max(map(len, made)) - min(map(len, made)) <= 1
    values = torch.cat(made).flatten(1).sum(1)
    assert torch.equal(values.sort().values, images.flatten(1).sum(1).sort().values)
    within = sum(float(own.var(0, correction=0).sum()) * len(own) for own in made) / n
    assert groups == 1 or within < 0.7 * float(images.var(0, correction=0).sum())


def test_groups_are_of_fifty_real_images_and_each_gets_as_many_virtual_ones():
    allowed = [(600, 10), (599, 10), (499, 10), (120, 10), (99, 10), (2000, 7), (2000, 1), (3, 4)]
    assert [own_groups(n, per_class) for n, per_class in allowed] == [10, 10, 5, 2, 1, 7, 1, 1]


def test_each_virtual_image_of_a_large_class_comes_nearest_to_its_own_group():
    generator = seeded(2)
    images = torch.randn(200, 1, 8, 8, generator=generator)
    upper_half = torch.tensor([1.0] * 4 + [-1.0] * 4)[:, None]
    images += 2 * upper_half * torch.tensor([-1.0, 1.0]).repeat(100)[:, None, None, None]
    labels = torch.zeros(200).long()
    asked = {"num_classes": 2, "steps": 60, "width": 8, "bank": 10, "generator": generator}
    made = distill_dm(images, labels, per_class=2, **asked)
    shown = (upper_half * made.images).mean((1, 2, 3))
    assert float(shown[0] * shown[1]) < 0
    assert float((shown[0] - shown[1]).abs()) > 0.5


def test_small_images_stay_within_the_pixel_values_of_the_real_ones():
    images, labels = stripes(60, seeded())
    images = images.clamp(-0.5, 1.25).repeat(1, 1, 2, 2)
    made = distilled("dm", images, labels, steps=8, width=4, bank=2, formation=2)
    assert made.initial_images is not None
    assert float(made.initial_images.max()) > 1.25
    assert -0.5 <= float(made.images.min()) < float(made.images.max()) <= 1.25


@pytest.mark.parametrize(
    ("shape", "formation", "seen"),
    [
        ((1, 28, 28), 2, (14, 14)),
        ((3, 17, 16), 2, (8, 8)),
        ((1, 28, 28), 3, (9, 9)),
        ((1, 12, 16), 2, (12, 16)),  # 6 x 8 would be too small
        ((1, 16, 16), 1, (16, 16)),
    ],
)
def test_random_networks_see_real_and_virtual_images_in_the_size_of_the_small_ones(
    shape, formation, seen, monkeypatch
):
    sizes = []
    depths = []
    whole = RandomConvNet.__call__

    def noted(self, images):
        sizes.append(images.shape[1:])
        depths.append(self.all_depths)
        return whole(self, images)

    monkeypatch.setattr(RandomConvNet, "__call__", noted)
    asked = {"per_class": 1, "steps": 2, "width": 4, "formation": formation}
    made = distilled("dm", normal(6, *shape), torch.arange(6) % 2, **asked)
    assert len(sizes) >= 4
    assert set(sizes) == {torch.Size((shape[0], *seen))}
    assert set(depths) == {seen != shape[1:]}
    assert made.images.shape == (2, *shape)


@pytest.mark.parametrize("setting", ["width", "bank"])
def test_an_empty_bank_or_network_is_refused(setting):
    images, labels = stripes(8, seeded())
    with pytest.raises(DistillError, check=at("width and bank")):
        distilled("dm", images, labels, **{setting: 0})
