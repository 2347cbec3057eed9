"""Subsets distilled together are as each alone; what is seen tells what they were made of."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from flwr_distill.distill import DistillError
from flwr_distill.distill.audit import Setting, attack, distilled_halves, findings, reconstruction
from flwr_distill.distill.distribution_matching import own_effort, real_means
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.kip import distill_kip
from flwr_distill.distill.shadows import (
    Canaries,
    bank,
    distil_subsets,
    dm_of_subsets,
    draw_members,
    with_canaries,
)
from flwr_distill.distill.virtual_data import VirtualData
from tests.distill.builders import distilled, seeded
from tests.errors import at


def samples(n=60, classes=3):
    generator = seeded()
    labels = torch.arange(n) % classes
    return torch.randn(n, 1, 8, 8, generator=generator) + labels[:, None, None, None], labels


def halves(n=60, sets=4):
    images, labels = samples(n)
    usual = np.full(n, "usual")
    return draw_members(
        sets, Canaries(images, labels, usual, np.arange(n)), np.random.default_rng(0)
    )


def test_a_subset_becomes_the_same_with_others_and_alone():
    images, labels = samples()
    members = halves()
    asked = {"per_class": 2, "init": "pixel-stats", "steps": 5}
    together = dm_of_subsets(images, labels, members, **asked)
    for row, own in zip(members, together, strict=True):
        (alone,) = dm_of_subsets(images, labels, row[None], **asked)
        torch.testing.assert_close(own.images, alone.images)
        assert own.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_subset_s_means_are_of_its_own_images(monkeypatch):
    """What is matched are the means that `real_means` has of the same images and networks."""
    images, labels = samples()
    members = halves(sets=2)
    seen = []
    monkeypatch.setattr(
        "flwr_distill.distill.shadows.match_means",
        lambda virtual, probes, *_, **__: seen.extend(probes),
    )
    dm_of_subsets(images, labels, members, per_class=1, steps=3)
    pairs = bank(images.shape, own_effort(images.shape, 1, None), 3, 0)
    for probe, (network, augment) in zip(seen, pairs, strict=True):
        expected = []
        for row in members:
            own = torch.from_numpy(row)
            order = labels[own].argsort(stable=True)
            counts = torch.bincount(labels[own]).tolist()
            expected.append(real_means(network, augment, images[own][order], counts))
        torch.testing.assert_close(probe.means, torch.cat(expected))


@pytest.mark.parametrize(("side", "per_class"), [(8, 2), (16, 4)])
def test_matching_is_as_the_distiller_s_own(monkeypatch, side, per_class):
    """Start, rates, groups, limits and formation, for small and for whole images."""
    calls = []

    def spy(virtual, probes, rates, tiles, progress=None, within=None, optimizer="adam"):
        calls.append((virtual.clone(), len(probes), rates, tiles.factor, within, optimizer))

    for module in ("flwr_distill.distill.shadows", "flwr_distill.distill.distribution_matching"):
        monkeypatch.setattr(f"{module}.match_means", spy)
    generator = seeded()
    images, labels = torch.randn(300, 1, side, side, generator=generator), torch.arange(300) % 2
    everyone = np.ones((1, 300), dtype=bool)
    dm_of_subsets(images, labels, everyone, per_class=per_class, formation=0, steps=30)
    distilled("dm", images, labels, seed=0, per_class=per_class, formation=0, steps=30)
    (ours, *our_rest), (theirs, *their_rest) = calls
    assert torch.equal(ours, theirs)
    assert our_rest == their_rest


def test_a_refresh_continues_from_the_previous_images_with_the_network_alone():
    images, labels = samples()
    members = halves(sets=2)
    made = dm_of_subsets(images, labels, members, per_class=2, steps=3)
    seen = []

    def network(batch):
        seen.append(len(batch))
        return batch.flatten(1)

    asked = {"per_class": 2, "steps": 40, "network": network}
    again = dm_of_subsets(images, labels, members, previous=made, **asked)
    (alone,) = dm_of_subsets(images, labels, members[1][None], previous=made[1:], **asked)
    torch.testing.assert_close(again[1].images, alone.images)
    assert seen.count(len(images)) == 2 * 5  # one pass of real images for each augmentation
    own = torch.from_numpy(members[0])
    for c in range(3):
        target = images[own][labels[own] == c].mean(0)
        before, after = (
            float((version[0].images[2 * c : 2 * c + 2].mean(0) - target).norm())
            for version in (made, again)
        )
        assert after < before


def test_each_refresh_needs_the_network_of_its_round():
    setting = Setting("dm", "noise", 1, steps=1, refreshes=2)
    asked = {"num_classes": 3, "sets": 4, "canaries": 0, "seed": 0}
    with pytest.raises(DistillError, check=at("refreshes", value=2)):
        distilled_halves(*samples(), setting, networks=[torch.flatten], **asked)


def test_a_single_class_has_wrongly_labelled_images_of_others_or_none():
    images = samples()[0]
    labels, others = torch.full((60,), 7), torch.full((5, 1, 8, 8), 9.0)
    made = with_canaries(images, labels, 4, seeded(1), others)
    wrong = torch.from_numpy(made.kinds == "mislabelled")
    assert (made.images[wrong] == 9.0).all()
    assert int(wrong.sum()) == 4
    assert (made.labels == 7).all()
    alone = with_canaries(images, labels, 4, seeded(1))
    assert set(alone.kinds) == {"usual", "strange", "duplicated"}
    with pytest.raises(DistillError, check=at("canaries", value=6)):
        with_canaries(images, labels, 6, torch.Generator(), others)


def test_other_distillers_are_called_as_they_are():
    images, labels = samples()
    members = halves(sets=3)
    asked = {"num_classes": 3, "per_class": 1, "steps": 3}
    made = distil_subsets("kip", images, labels, members, seed=5, **asked)
    own = torch.from_numpy(members[2])
    alone = distill_kip(images[own], labels[own], generator=seeded(5), **asked)
    torch.testing.assert_close(made[2].images, alone.images, rtol=1e-3, atol=1e-4)


def test_canaries_are_what_they_are_called_and_copies_share_their_membership():
    images, labels = samples()
    made = with_canaries(images, labels, 4, seeded(1))
    kinds = {kind: made.kinds == kind for kind in ("mislabelled", "strange", "duplicated")}
    assert [int(own.sum()) for own in kinds.values()] == [4, 4, 8]
    usual = torch.from_numpy(made.kinds == "usual")
    assert torch.equal(made.images[usual], images[usual])
    assert (made.labels != labels).numpy().tolist() == kinds["mislabelled"].tolist()
    copies = np.flatnonzero(made.twin != np.arange(60))
    assert torch.equal(made.images[copies], made.images[made.twin[copies]])
    assert torch.equal(made.labels[copies], made.labels[made.twin[copies]])
    members = draw_members(20, made, np.random.default_rng(0))
    assert (members[:, copies] == members[:, made.twin[copies]]).all()
    assert 0.35 < members.mean() < 0.65


def test_too_few_images_are_refused():
    images, labels = samples(12)
    with pytest.raises(DistillError, check=at("canaries", value=4)):
        with_canaries(images, labels, 4, torch.Generator())
    usual = Canaries(images, labels, np.full(12, "usual"), np.arange(12))
    nobody = cast(np.random.Generator, SimpleNamespace(random=np.ones))
    with pytest.raises(DistillError, match="too few images"):
        draw_members(4, usual, nobody)


@pytest.mark.slow
def test_copies_of_real_images_are_found_and_noise_that_has_seen_none_is_not():
    """The attack is not blind, and does not see what is not there."""
    images, labels = samples(80, classes=2)
    asked = {"num_classes": 2, "sets": 24, "canaries": 0, "seed": 0}
    copies, nothing = (
        findings(attack(distilled_halves(images, labels, own, **asked), num_classes=2, seed=0))
        for own in (Setting("dm", "real", 10, steps=1), Setting("dm", "noise", 1, steps=1))
    )
    nearest = {found.attack: found for found in copies}["nearest image"]
    assert nearest.curve.auc.low > 0.55
    assert nearest.curve.at_1pct.value > 0.05
    assert nothing[0].curve.auc.low < 0.55


@pytest.mark.parametrize("formation", [1, 2])
def test_copies_come_nearest_to_what_they_were_made_of_and_noise_no_more_than_by_chance(
    formation, monkeypatch
):
    images, labels = samples(64)
    asked = {"num_classes": 3, "sets": 24, "canaries": 0, "seed": 0}

    def arrived(made):
        tiles = Formation.of(formation, images.shape)
        return [
            VirtualData(packed, labels[: len(packed)], "dm", 1, 0, "real", formation=formation)
            for packed in map(tiles.pack, made)
        ]

    def copies(_, images, labels, members, **__):
        return arrived([images[torch.from_numpy(row)][:8] for row in members])

    def others(_, images, labels, members, **__):
        return arrived([1 + torch.randn(8, *images.shape[1:]) for _ in members])

    found = []
    for make in (copies, others):
        monkeypatch.setattr("flwr_distill.distill.audit.distil_subsets", make)
        scores = np.zeros((6, 24, 64))
        monkeypatch.setattr(
            "flwr_distill.distill.audit.attack_scores", lambda *_, own=scores, **__: own
        )
        halves = distilled_halves(images, labels, Setting("dm", "real", 8, formation), **asked)
        found.append(reconstruction(attack(halves, num_classes=3, seed=0)))
    of_copies, of_noise = found
    assert of_copies.pixels.low > 0.95
    assert of_copies.features.low > 0.95
    assert abs(of_noise.pixels.value - of_noise.by_chance) < 0.15
    assert abs(of_noise.features.value - of_noise.by_chance) < 0.15
