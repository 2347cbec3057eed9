"""Statistics of a node's data: when they leave, how they are hidden, and what they cost."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.node.requests import MessageRequest
from flwr_distill.node.statistics import release_statistics
from flwr_distill.protocol.messages import STATISTICS
from flwr_distill.protocol.statistics import ASK_STATISTICS, read_statistics, statistics_record
from flwr_distill.task.cells import Tables
from flwr_distill.task.errors import SettingsError
from tests.attacks.site import Site, account, refused
from tests.errors import at

ALLOWED = STANDARD.model_copy(update={"statistics": "allowed"})
NOISY = HOSPITAL.model_copy(update={"statistics": "allowed", "statistics_epsilon": 2.0})
NAMES = ",".join(map(str, range(10)))


def asked(folder: Path, policy: Policy, number: int = 300, **settings: Any) -> tuple[Site, Any]:
    site = Site(folder, policy, number=number)
    site.run(**{"strategy": "fedavg", "num_rounds": 0, "statistics": True, **settings})
    return site, site.ask(ASK_STATISTICS, RecordDict())


@pytest.mark.parametrize("policy", [STANDARD, HOSPITAL])
def test_none_leave_unless_the_owner_allows_them(tmp_path: Path, policy: Policy) -> None:
    assert refused(asked(tmp_path, policy)[1], "statistics")


def test_they_leave_rounded_and_are_in_the_outbox(tmp_path: Path) -> None:
    site, answer = asked(tmp_path, ALLOWED, number=196)
    tables, report = read_statistics(answer.content[STATISTICS])
    sizes = {str(label): 20 if label < 6 else 10 for label in range(10)}
    assert tables["class"] == sizes, "of 20 and 19"
    assert report.floor == 10
    assert all(n % 10 == 0 for cells in tables.values() for n in cells.values())
    assert sum(tables["size"].values()) < 196
    assert "statistics: cells, counts, epsilon" in " ".join(
        list(entries(site.state_dir / FOLDER))[-1]["what"]
    )
    exact, _ = read_statistics(asked(tmp_path / "open", OPEN, number=196)[1].content[STATISTICS])
    assert sum(exact["class"].values()) == exact["size"]["4x4"] == 196


def test_noise_is_on_all_cells_of_the_run_and_booked(tmp_path: Path) -> None:
    named = {"private__classes": NAMES}
    site, answer = asked(tmp_path, NOISY.model_copy(update={"statistics_floor": 1}), **named)
    tables, report = read_statistics(answer.content[STATISTICS])
    assert report.epsilon == account(site) == 2.0
    assert set(tables) == {"mode", "brightness", "class"}, "sizes are the data's own"
    assert tables["class"] != {str(label): 30 for label in range(10)}
    assert set(tables["mode"]) > {"L"}, "cells without samples have noise, too"
    again, _ = read_statistics(site.ask(ASK_STATISTICS, RecordDict()).content[STATISTICS])
    assert again != tables
    assert account(site) == 4.0
    for _ in range(3):
        answer = site.ask(ASK_STATISTICS, RecordDict())
    assert account(site) == 10.0
    assert refused(site.ask(ASK_STATISTICS, RecordDict()), "most-epsilon")
    assert account(site) == 10.0


def test_noise_needs_cells_that_a_run_names(tmp_path: Path) -> None:
    assert refused(asked(tmp_path, NOISY, dataset="digits")[1], "statistics-epsilon")


def test_a_promise_needs_noise() -> None:
    hospital = HOSPITAL.model_dump(by_alias=True)
    with pytest.raises(SettingsError, check=at("statistics", value="allowed")):
        Policy.checked({**hospital, "statistics": "allowed"}, "policy")
    with pytest.raises(SettingsError, check=at("statistics-epsilon", value=1.0)):
        Policy.checked({"statistics-epsilon": 1.0}, "policy")
    Policy.checked({**hospital, "statistics": "allowed", "statistics-epsilon": 1.0}, "policy")


def released(tables: Tables, **given: Any) -> tuple[Any, Tables]:
    """What the guard says of a worker's tables, and what it would let out."""
    request = MessageRequest.read(
        RecordDict(),
        message_type=ASK_STATISTICS,
        bundle="",
        run_config={"dataset": "private", "private.classes": "cat,dog", "private.shape": "1x8x8"},
    )
    reply = RecordDict({STATISTICS: statistics_record(tables, **given)})
    refusal = release_statistics(ALLOWED, request, reply, samples=60, class_names=["cat", "wolf"])
    return refusal, read_statistics(reply.config_records[STATISTICS])[0]


@pytest.mark.parametrize(
    "tables",
    [
        {"class": {"cat": 61}},
        {"class": {"cat": 30}, "brightness": {"0.1 to 0.2": 31}},
        {"class": {"Jane Doe": 30}},
        {"column age": {"50 to 60": 30}},
        {"brightness": {"Jane Doe": 30}},
        {"size": {"Jane Doe": 30}},
        {"size": {"8x8": 30}, "mode": {"Jane": 30}},
    ],
)
def test_a_worker_that_lies_about_what_there_is_sends_nothing(tables: Tables) -> None:
    refusal, _ = released(tables)
    assert refusal.rule == "replies"
    assert "Jane" not in str(refusal)


def test_what_a_worker_did_not_round_is_rounded_whatever_it_says() -> None:
    tables = {"class": {"cat": 9, "wolf": 25}, "size": {"8x8": 34}}
    for given in ({}, {"floor": 10}, {"epsilon": 1.0}):
        refusal, left = released(tables, **given)
        assert refusal is None
        assert left == {"class": {"wolf": 20}, "size": {"8x8": 20}}


def test_a_reply_without_counts_is_refused() -> None:
    request = MessageRequest.read(
        RecordDict(), message_type=ASK_STATISTICS, bundle="", run_config={"dataset": "private"}
    )
    malformed = statistics_record({"class": {"cat": 1}})
    malformed["cells"] = ["cat", "dog"]
    for record in (malformed, None):
        reply = RecordDict({STATISTICS: record} if record else {})
        refusal = release_statistics(ALLOWED, request, reply, samples=None, class_names=())
        assert refusal is not None
        assert refusal.rule == "replies"
