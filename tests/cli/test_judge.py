"""The judges tell a telling training set from one that says nothing."""

from dataclasses import replace

import pytest
import torch

import flwr_distill.cli.judge
from flwr_distill.cli.judge import (
    CONVNET,
    JUDGES,
    LENET,
    QUICK,
    judges,
    train_and_score,
    training_seconds,
)
from flwr_distill.task.datasets import DataSpec, Samples

SPEC = DataSpec("halves", (1, 8, 8), 2, (0.5,), (0.5,))


def halves(n, seed):
    """Noise that is brighter above in class 0, below in class 1."""
    inputs = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(n) % 2
    inputs[labels == 0, :, :4] += 2
    inputs[labels == 1, :, 4:] += 2
    return Samples(inputs, labels)


def score(train, test, steps, seed=0, judge=QUICK):
    return train_and_score(replace(judge, steps=steps), train, test, SPEC, seed=seed)


def test_accuracy_is_high_on_what_can_be_learned_and_by_chance_on_what_cannot():
    train, test = halves(40, 0), halves(200, 1)
    assert score(train, test, steps=60) > 0.95
    unrelated = Samples(train.inputs, torch.arange(40) // 2 % 2)
    assert 0.2 < score(unrelated, test, steps=60) < 0.8


@pytest.mark.parametrize("judge", judges("full", SPEC), ids=lambda judge: judge.name)
def test_every_judge_learns_what_there_is(judge):
    assert score(halves(40, 0), halves(200, 1), steps=40, judge=judge) > 0.9


def test_soft_labels_teach_like_the_hard_ones_they_stand_for():
    train, test = halves(40, 0), halves(200, 1)
    soft = Samples(train.inputs, torch.nn.functional.one_hot(train.labels, 2).float())
    assert score(train, test, steps=20) == score(soft, test, steps=20)


def test_of_one_image_its_class_is_learned():
    images, test = halves(2, 0), halves(60, 1)
    of_class_0 = test.subset((test.labels == 0).nonzero().flatten())
    single = (images.subset(torch.tensor([i])) for i in (0, 1))
    assert [score(image, of_class_0, steps=30) for image in single] == [1, 0]


@pytest.mark.parametrize("judge", [QUICK, replace(QUICK, augment="auto")], ids=["plain", "changed"])
def test_the_same_seed_gives_the_same_score_and_global_state_is_untouched(judge):
    before = torch.get_rng_state()
    train, test = halves(10, 0), halves(500, 1)
    scores = [score(train, test, steps=1, seed=seed, judge=judge) for seed in (0, 0, 1)]
    assert scores[0] == scores[1] != scores[2]
    assert torch.equal(before, torch.get_rng_state())


def test_only_judges_whose_networks_take_the_images_are_on_the_panel():
    names = {shape: [judge.name for judge in judges("full", replace(SPEC, shape=shape))]
             for shape in [(1, 28, 28), (3, 32, 32), (1, 4, 4)]}  # fmt: skip
    assert names == {
        (1, 28, 28): ["quick", "ConvNet", "LeNet", "MLP", "ResNet-8"],
        (3, 32, 32): ["quick", "ConvNet", "MLP", "ResNet-8"],
        (1, 4, 4): ["quick", "MLP", "ResNet-8"],
    }
    assert judges("quick", SPEC) == JUDGES["quick"]


def test_learning_rates_follow_the_papers():
    """ConvNet's falls to a tenth after half of the steps, LeNet's by a cosine to 0."""
    assert [CONVNET.schedule(done) for done in (0, 0.5, 0.501, 0.999)] == [1, 1, 0.1, 0.1]
    assert [LENET.schedule(done) for done in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])


def test_progress_is_told_now_and_then_and_at_the_end():
    steps_done: list[tuple[int, int]] = []

    def progress(step, steps, loss):
        assert loss > 0
        steps_done.append((step, steps))

    judge, train = replace(QUICK, steps=25), halves(10, 0)
    train_and_score(judge, train, train, SPEC, seed=0, progress=progress)
    assert steps_done == [(10, 25), (20, 25), (25, 25)]


def test_three_steps_tell_how_long_training_takes(monkeypatch):
    clock = iter([7.0, 9.0, 11.0])  # the first step may prepare things
    monkeypatch.setattr(flwr_distill.cli.judge.time, "perf_counter", lambda: next(clock))
    assert training_seconds(replace(QUICK, steps=50), halves(10, 0), SPEC) == 50 * 2
