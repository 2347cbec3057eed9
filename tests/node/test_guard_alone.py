"""The guard's verdicts, without a transport: no SuperNode, no store, no call of Flower's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.guard import Guard
from flwr_distill.node.policy import OPEN, Policy
from flwr_distill.protocol.replies import REFUSED

CONTENT = b"an app bundle"
NAME = "7d66e14fc2b9d8a2d1d7bf4a9fbcb6ee4c66eb42b9b1b25e0b93ec9e2a4b9c7e"
TRAIN = Header("1", "train", 7, 5)


@pytest.fixture(autouse=True)
def no_bundle_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_hash", "unpack"):
        monkeypatch.setattr(f"flwr_distill.node.guard.{name}", lambda *_: None)


def guard(folder: Path, policy: Policy = OPEN) -> Guard:
    return Guard(policy, folder, {}, lambda content, overrides: {"strategy": "fedavg", **overrides})


def bundle(*, signed: bool = False, **overrides: Any) -> Bundle:
    return Bundle(NAME, CONTENT, signed, overrides)


def message() -> RecordDict:
    return RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1})})


def reply() -> Answer:
    return Answer(RecordDict({"arrays": model(), "metrics": MetricRecord({"num-examples": 10})}))


def model() -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.ones(3, np.float32))})


def test_what_the_policy_allows_is_admitted_and_its_reply_leaves(tmp_path: Path) -> None:
    judge, given = guard(tmp_path), reply()
    assert judge.admit(TRAIN, message(), bundle()) is None
    answer = judge.release("1", given, 1000)
    assert answer.content is given.content
    assert answer.note == ""


def test_a_refused_message_is_answered_with_the_rule_whatever_the_app_replies(
    tmp_path: Path,
) -> None:
    judge = guard(tmp_path, OPEN.model_copy(update={"strategies": ["hfldd"]}))
    refusal = judge.admit(TRAIN, message(), bundle())
    assert refusal is not None
    assert refusal.content is None
    assert refusal.code == REFUSED
    assert ": strategies: " in refusal.reason
    assert ": strategies: " in refusal.note
    assert judge.release("1", reply(), 1000).reason == refusal.reason


@pytest.mark.parametrize("signed", [True, False])
def test_a_bundle_is_admitted_if_a_publisher_of_the_owner_has_signed_it(
    signed: bool, tmp_path: Path
) -> None:
    judge = guard(tmp_path, OPEN.model_copy(update={"publishers": {"hub": "a key"}}))
    refusal = judge.admit(TRAIN, message(), bundle(signed=signed))
    assert (refusal is None) == signed
    assert bool(judge.run_config(7, bundle(signed=signed))) == signed


def test_a_message_has_one_reply_and_no_other_message_has_it(tmp_path: Path) -> None:
    judge = guard(tmp_path)
    assert judge.admit(TRAIN, message(), bundle()) is None
    with pytest.raises(LookupError):
        judge.release("2", reply(), 1000)
    judge.release("1", reply(), 1000)
    with pytest.raises(LookupError):
        judge.release("1", reply(), 1000)


def test_an_apps_error_leaves_with_its_code(tmp_path: Path) -> None:
    judge = guard(tmp_path)
    assert judge.admit(TRAIN, message(), bundle()) is None
    answer = judge.release("1", Answer(None, 6, "it failed"), 10)
    assert (answer.content, answer.code, answer.reason) == (None, 6, "it failed")
