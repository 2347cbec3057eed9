"""Noise on evaluations: its distribution, what it costs by a direct sum, and what is dropped."""

from collections import Counter

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flwr_distill.node.evaluation import blur, cost_of, judge_evaluation, noisy_rate
from flwr_distill.node.policy import HOSPITAL, OPEN, Policy
from flwr_distill.node.requests import MessageRequest

EVALUATION = MessageRequest.read(
    RecordDict({"arrays": ArrayRecord()}),
    message_type="evaluate",
    bundle="0" * 64,
    run_config={"strategy": "fedavg"},
)


def replied(**more: float) -> RecordDict:
    shown = {"num-examples": 200, "eval-accuracy": 0.3, "eval-loss": 1.5, **more}
    return RecordDict({"metrics": MetricRecord(shown)})


def frequencies(count: int, epsilon: float, draws: int) -> np.ndarray:
    """How often each of 0 to 100 leaves for a count of 100 samples."""
    shown = Counter(round(100 * noisy_rate(count / 100, 100, epsilon)) for _ in range(draws))
    return np.array([shown[k] for k in range(101)])


def test_noise_has_the_geometric_mechanisms_distribution() -> None:
    epsilon, draws = 0.5, 40_000
    a = np.exp(-epsilon)
    k = np.arange(-50, 51)
    wanted = (1 - a) / (1 + a) * a ** np.abs(k)  # Ghosh et al. 2009, definition 2.1
    wanted[0] += a**51 / (1 + a)  # what is clipped to 0 and to 1
    wanted[-1] += a**51 / (1 + a)
    assert wanted.sum() == pytest.approx(1)
    error = frequencies(50, epsilon, draws) - draws * wanted
    assert (np.abs(error) < 6 * np.sqrt(draws * wanted) + 3).all()


def test_one_sample_more_changes_no_probability_by_more_than_epsilon_allows() -> None:
    epsilon, draws = 0.5, 40_000
    one, other = frequencies(50, epsilon, draws), frequencies(51, epsilon, draws)
    often = (one > 300) & (other > 300)
    ratio = np.abs(np.log(one[often] / other[often]))
    assert ratio.max() < epsilon + 6 * np.sqrt(2 / 300)
    assert ratio.mean() > epsilon / 2, "and the bound is not far off"


def test_a_rate_is_rounded_and_in_bounds() -> None:
    for rate in (0.0, 0.123456, 1.0):
        shown = [noisy_rate(rate, 137, 0.2) for _ in range(50)]
        assert all(0 <= value <= 1 and value == round(value, 2) for value in shown)


def test_only_the_rate_and_the_number_of_samples_are_left_of_an_evaluation() -> None:
    reply = replied()
    assert cost_of(HOSPITAL, EVALUATION) == 0.1
    blur(HOSPITAL, EVALUATION, reply)
    assert set(reply["metrics"]) == {"num-examples", "eval-accuracy"}
    reply = replied()
    assert cost_of(OPEN, EVALUATION) == 0
    blur(OPEN, EVALUATION, reply)
    assert reply == replied()


@pytest.mark.parametrize(
    ("policy", "samples", "number", "rule"),
    [
        (HOSPITAL, None, 100, ""),
        (HOSPITAL, None, 99, "fewest-held-out"),
        (HOSPITAL, 100, 100, ""),
        (HOSPITAL, 100, 10**9, "replies"),  # its noise would be next to nothing
        (Policy(fewest_held_out=5), None, 4, "fewest-held-out"),
        (OPEN, None, 1, ""),
    ],
)
def test_an_evaluation_is_on_as_many_samples_as_the_owner_asks_and_no_more_than_there_are(
    policy: Policy, samples: int | None, number: int, rule: str
) -> None:
    refusal = judge_evaluation(policy, EVALUATION, replied(**{"num-examples": number}), samples)
    assert ("" if refusal is None else refusal.rule) == rule
