"""Before a distillation begins, its duration and memory are told from two steps."""

import time

import pytest
import torch

from flwr_distill.distill import VirtualData, distill_dm, distribution_matching, registry
from flwr_distill.distill.forecast import forecast

IMAGES, LABELS = torch.zeros(4, 1, 4, 4), torch.zeros(4).long()


class Slow:
    """A distiller of known duration, on a clock of its own."""

    now, drawn, stepped, warm = 0.0, 0, 0, False

    def __call__(self, images, labels, *, steps=None, bank=40, progress, **rest):
        steps = steps or 300
        self.drawn, self.stepped = min(bank, steps), 0
        self.now += 3.0 + 5.0 * self.drawn + 1000.0 * (not self.warm)
        self.warm = True
        for step in range(steps):
            self.now += 2.0
            self.stepped += 1
            progress(step + 1, steps, 0.0)
        return VirtualData(images, labels, "slow", steps, 0, "noise")


@pytest.fixture
def slow(monkeypatch):
    method = Slow()
    monkeypatch.setitem(registry._DISTILLERS, "slow", method)
    monkeypatch.setattr(time, "perf_counter", lambda: method.now)
    return method


def told(**arguments):
    return forecast("slow", IMAGES, LABELS, device=torch.device("cpu"), **arguments)


def test_two_steps_tell_the_duration_of_all_with_the_networks_that_are_drawn_first(slow):
    assert told().seconds == pytest.approx(3 + 40 * 5 + 300 * 2)
    assert (slow.drawn, slow.stepped) == (2, 2)
    assert told(steps=10).seconds == pytest.approx(3 + 10 * 5 + 10 * 2)


def test_a_single_step_is_told_too(slow):
    assert told(steps=1).seconds == pytest.approx(3 + 5 + 2)


def test_preparing_without_a_bank_is_counted_once(slow, monkeypatch):
    def once(images, labels, *, progress, **rest):
        return slow(images, labels, bank=2, progress=progress)

    monkeypatch.setitem(registry._DISTILLERS, "slow", once)
    assert told().seconds == pytest.approx(3 + 2 * 5 + 300 * 2)


@pytest.mark.parametrize("side", [8, 16])
def test_so_many_networks_are_counted_as_distribution_matching_draws(side, monkeypatch):
    clock, draw = [0.0], distribution_matching.draw_pair

    def slow_draw(*arguments, **options):
        clock[0] += 10.0
        return draw(*arguments, **options)

    monkeypatch.setattr(distribution_matching, "draw_pair", slow_draw)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    images, labels = torch.rand(4, 1, side, side), torch.zeros(4).long()
    asked = {"num_classes": 1, "per_class": 1, "steps": 45, "formation": 0}
    expected = forecast(
        "dm", images, labels, device=torch.device("cpu"), generator=torch.Generator(), **asked
    )
    clock[0] = 0.0
    distill_dm(images, labels, generator=torch.Generator(), **asked)
    assert expected.seconds == clock[0]


def test_the_memory_is_that_of_the_process(slow):
    assert told().memory > 10**7
