"""Counts of held-out samples: when they leave a node, with what noise, and what they cost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flwr_distill.node.evaluation import judge_counts, noisy_confusion
from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy, described
from flwr_distill.node.requests import MessageRequest
from flwr_distill.protocol.counts import COUNTS, read_counts
from flwr_distill.task.errors import SettingsError
from tests.attacks.site import PRIVATE, Site, account, crafted, evaluated
from tests.errors import at

ASKS = {"strategy": "fedavg", "evaluate__counts": True, "train__holdout": 0.4}
ALLOWED = STANDARD.model_copy(update={"counts": "allowed"})
NOISY = HOSPITAL.model_copy(update={"counts": "allowed", "counts_epsilon": 2.0})


def record_of(answer: Message) -> ConfigRecord:
    """The counts in an answer, which has its accuracy in any case."""
    assert answer.has_content(), answer.error
    assert "eval-accuracy" in answer.content["metrics"]
    return answer.content.config_records[COUNTS]


def asked(folder: Path, policy: Policy, **settings: Any) -> tuple[Site, Message]:
    site = Site(folder, policy, number=1500)
    site.run(**{**ASKS, **settings})
    return site, evaluated(site, crafted(np.eye(10)[3]))


def test_exact_counts_leave_where_the_owner_allows_them(tmp_path: Path) -> None:
    site, answer = asked(tmp_path, ALLOWED)
    samples = answer.content["metrics"]["num-examples"]
    counts = read_counts(record_of(answer), 10)
    assert counts.samples == samples
    assert counts.confusion[:, 3].sum() == samples == 600
    assert answer.content["metrics"]["eval-accuracy"] == counts.confusion[3, 3] / samples
    line = list(entries(site.state_dir / FOLDER))[-1]
    assert "counts: calibration, confusion, others, own" in line["what"]


@pytest.mark.parametrize(
    ("policy", "settings", "reason"),
    [
        (STANDARD, {}, "policy"),
        (HOSPITAL, PRIVATE, "policy"),
        (ALLOWED, PRIVATE, "privacy"),
        (ALLOWED, {"strategy": "fedavg", "hfldd__dp_epsilon": 2.0}, "privacy"),
        (ALLOWED.model_copy(update={"fewest_held_out_of_a_class": 100}), {}, "few"),
        (NOISY.model_copy(update={"most_epsilon": 2.0}), PRIVATE, "budget"),
    ],
)
def test_otherwise_the_reply_says_why_and_has_its_accuracy(
    policy: Policy, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, answer = asked(tmp_path, policy, **settings)
    assert dict(record_of(answer)) == {"withheld": reason}


def test_nothing_more_leaves_where_the_run_does_not_ask(tmp_path: Path) -> None:
    for number, policy in enumerate((STANDARD, OPEN, ALLOWED, HOSPITAL, NOISY)):
        private = PRIVATE if policy.least_noise else {}
        _, answer = asked(tmp_path / str(number), policy, evaluate__counts=False, **private)
        assert set(answer.content) == {"metrics"}


def test_a_noisy_matrix_leaves_alone_and_is_booked(tmp_path: Path) -> None:
    site, answer = asked(tmp_path, NOISY, **PRIVATE)
    samples = answer.content["metrics"]["num-examples"]
    assert set(record_of(answer)) == {"confusion"}
    first = read_counts(record_of(answer), 10).confusion
    assert account(site) == pytest.approx(0.1 + 2.0)
    second = read_counts(record_of(evaluated(site, crafted(np.eye(10)[3])))).confusion
    assert account(site) == pytest.approx(2 * (0.1 + 2.0))
    assert (first != second).any(), "each time with other noise"
    assert first[:, 3].sum() > samples / 2, "and near to what was counted"


def test_what_a_changed_app_puts_in_place_of_counts_tells_nothing_for_nothing() -> None:
    """Under a promise its word on why it has none would be an answer, beside the noise."""
    request = MessageRequest.read(
        RecordDict(),
        message_type="evaluate",
        bundle="",
        run_config={"evaluate.counts": True, "train.dp-noise": 1.0},
    )
    for record in ({"withheld": "classes"}, {"withheld": "few"}, {"confusion": [1, -1]}, {}, None):
        reply = RecordDict({"metrics": MetricRecord({"num-examples": 200, "eval-accuracy": 0.5})})
        if record is not None:
            reply[COUNTS] = ConfigRecord(record)
        assert judge_counts(NOISY, request, reply, left=10.0) == 2.0
        assert dict(reply[COUNTS]) == {"withheld": "malformed"}
        assert judge_counts(HOSPITAL, request, reply, left=10.0) == 0
        assert dict(reply[COUNTS]) == {"withheld": "policy"}


@pytest.mark.parametrize("policy", [NOISY, OPEN])
def test_counts_of_no_samples_are_malformed(policy: Policy) -> None:
    """The guard would otherwise fail on them, and no reply would leave."""
    request = MessageRequest.read(
        RecordDict(), message_type="evaluate", bundle="", run_config={"evaluate.counts": True}
    )
    reply = RecordDict({"metrics": MetricRecord({"num-examples": 0, "eval-accuracy": 0.0})})
    reply[COUNTS] = ConfigRecord({"confusion": [0, 0, 0, 0]})
    judge_counts(policy, request, reply, left=10.0)
    assert dict(reply[COUNTS]) == {"withheld": "malformed"}


def test_noise_hides_one_sample_and_the_number_of_samples_stays() -> None:
    epsilon, draws = 1.0, 20_000
    one, other = np.array([[4, 1], [0, 3]]), np.array([[3, 2], [0, 3]])

    def frequencies(matrix: np.ndarray) -> dict[bytes, int]:
        seen: dict[bytes, int] = {}
        for _ in range(draws):
            noisy = noisy_confusion(matrix, epsilon)
            assert noisy.sum() == 8
            assert (noisy >= 0).all()
            seen[noisy.tobytes()] = seen.get(noisy.tobytes(), 0) + 1
        return seen

    first, second = frequencies(one), frequencies(other)
    often = [key for key in first if first[key] > 200 and second.get(key, 0) > 200]
    ratios = [abs(np.log(first[key] / second[key])) for key in often]
    assert len(ratios) > 5
    assert max(ratios) < epsilon + 6 * np.sqrt(2 / 200)


def test_a_promise_needs_noise_on_counts() -> None:
    with pytest.raises(SettingsError, check=at("counts", value="allowed")):
        Policy.checked({**HOSPITAL.model_dump(by_alias=True), "counts": "allowed"}, "policy")
    with pytest.raises(SettingsError, check=at("counts-epsilon", value=1.0)):
        Policy.checked({"counts-epsilon": 1.0}, "policy")
    noisy = {**HOSPITAL.model_dump(by_alias=True), "counts-epsilon": 1.0, "counts": "allowed"}
    assert "noise, at an epsilon of 1 each time" in " ".join(
        described(Policy.checked(noisy, "policy"))
    )


def test_a_node_says_of_its_counts() -> None:
    assert "Never sends counts of held-out samples." in described(STANDARD)
    assert any("each class there has 10 or more" in line for line in described(ALLOWED))
