"""The judge tells a telling training set from one that says nothing."""

import torch

from cli.judge import train_and_score
from task.datasets import DataSpec, Samples

SPEC = DataSpec("halves", (1, 8, 8), 2, (0.5,), (0.5,))


def halves(n: int, seed: int) -> Samples:
    """Noise that is brighter above in class 0, below in class 1."""
    inputs = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(n) % 2
    inputs[labels == 0, :, :4] += 2
    inputs[labels == 1, :, 4:] += 2
    return Samples(inputs, labels)


def test_accuracy_is_high_on_what_can_be_learned_and_by_chance_on_what_cannot() -> None:
    train, test = halves(40, 0), halves(200, 1)
    assert train_and_score(train, test, SPEC, steps=60, seed=0) > 0.95
    unrelated = Samples(train.inputs, torch.arange(40) // 2 % 2)
    assert 0.2 < train_and_score(unrelated, test, SPEC, steps=60, seed=0) < 0.8


def test_soft_labels_teach_like_the_hard_ones_they_stand_for() -> None:
    train, test = halves(40, 0), halves(200, 1)
    soft = Samples(train.inputs, torch.nn.functional.one_hot(train.labels, 2).float())
    scores = [train_and_score(samples, test, SPEC, steps=20, seed=0) for samples in (train, soft)]
    assert scores[0] == scores[1]


def test_of_one_image_its_class_is_learned() -> None:
    images, test = halves(2, 0), halves(60, 1)
    of_class_0 = test.subset((test.labels == 0).nonzero().flatten())
    scores = [
        train_and_score(images.subset(torch.tensor([i])), of_class_0, SPEC, steps=30, seed=0)
        for i in (0, 1)
    ]
    assert scores == [1, 0]


def test_the_same_seed_gives_the_same_score_and_global_state_is_untouched() -> None:
    before = torch.get_rng_state()
    train, test = halves(10, 0), halves(500, 1)
    scores = [train_and_score(train, test, SPEC, steps=1, seed=seed) for seed in (0, 0, 1)]
    assert scores[0] == scores[1] != scores[2]
    assert torch.equal(before, torch.get_rng_state())
