"""The journal of a run."""

import json
import logging
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest
from flwr.app import Error, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.protocol.replies import SET_ASIDE, UNREADABLE, set_aside
from flwr_distill.server.record.journal import Journal
from tests.grids import answering, broken, messages_to, plain_grid, screening_grid, silent
from tests.server.run_folder import read_lines, without_times


def test_a_phase_is_written_with_its_round_its_time_and_the_numbers_of_each_node(
    memory_grid, tmp_path
):
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.round = 3
    inner = memory_grid(
        {
            1: answering(loss=0.5, examples=7),
            2: broken,
            3: answering(loss=float("nan"), all=[1.0, 2.0]),
        }
    )
    plain_grid(inner, deadline=5, journal=journal).send_and_receive(messages_to([1, 2, 3]))
    (line,) = [
        each for each in without_times(tmp_path / "run" / "journal.jsonl") if "phase" in each
    ]
    assert 0 <= line.pop("seconds") < 5
    assert line == {
        "round": 3,
        "phase": "train",
        "asked": 3,
        "nodes": {"1": {"loss": 0.5, "examples": 7}, "3": {}},
    }


def test_warnings_and_errors_are_written_inside_with_and_nothing_else_is(tmp_path):
    log(logging.WARNING, "before")
    with Journal(tmp_path / "journal.jsonl") as journal:
        log(logging.INFO, "all is well")
        log(logging.WARNING, "Node %d failed", 7)
        journal.round = 1
        log(logging.ERROR, "worse")
    log(logging.WARNING, "after")
    assert all("time" in line for line in read_lines(tmp_path / "journal.jsonl"))
    assert without_times(tmp_path / "journal.jsonl") == [
        {"round": 0, "warning": "Node 7 failed"},
        {"round": 1, "error": "worse"},
    ]


def test_nodes_that_do_not_reply_leave_a_warning(memory_grid, tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        grid = plain_grid(memory_grid({1: silent}), deadline=0.1, journal=journal)
        grid.send_and_receive(messages_to([1]))
    phase, failed, warning = read_lines(tmp_path / "journal.jsonl")
    assert phase["nodes"] == {}
    assert failed["failed"] == "1"
    assert "within 0 s: 1 (" in warning["warning"]


def test_the_mean_over_nodes_counts_each_node_the_same_and_holds_for_its_round(
    memory_grid, tmp_path
):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.round = 1
    inner = memory_grid(
        {
            1: answering(accuracy=0.5, examples=1000),
            2: answering(accuracy=0.75, examples=1),
            3: answering(accuracy=float("nan")),
        }
    )
    assert journal.mean("train", "accuracy") is None
    plain_grid(inner, deadline=5, journal=journal).send_and_receive(messages_to([1, 2, 3]))
    assert journal.mean("train", "accuracy") == 0.625
    assert journal.mean("train", "loss") is None
    assert journal.mean("evaluate", "accuracy") is None
    journal.round = 2
    assert journal.mean("train", "accuracy") is None


def test_the_journal_of_a_resumed_run_keeps_the_rounds_that_are_over(tmp_path):
    file = tmp_path / "journal.jsonl"
    written = [{"round": number, "warning": word} for number in range(4) for word in "ab"]
    file.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"round": 1, "wa')
    with Journal(file, rounds=2) as journal:
        assert read_lines(file) == written[:6]
        log(logging.WARNING, "again")
        assert journal.round == 3
    assert without_times(file) == [*written[:6], {"round": 3, "warning": "again"}]
    Journal(tmp_path / "none.jsonl", rounds=2)
    assert read_lines(tmp_path / "none.jsonl") == []
    Journal(file)
    assert read_lines(file) == []


def test_a_disk_that_is_full_leaves_no_half_line_that_no_resumed_run_could_read(tmp_path):
    file = tmp_path / "journal.jsonl"
    journal, before = Journal(file), getrlimit(RLIMIT_FSIZE)
    journal.round = 1
    journal.book_error("first")
    setrlimit(RLIMIT_FSIZE, (file.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            journal.book_error("second")
    finally:
        setrlimit(RLIMIT_FSIZE, before)
    journal.book_error("there is room again")
    Journal(file, rounds=1)
    assert [line["error"] for line in read_lines(file)] == ["first", "there is room again"]


def test_a_resumed_run_that_cannot_write_its_journal_loses_no_line(tmp_path):
    file, before = tmp_path / "journal.jsonl", getrlimit(RLIMIT_FSIZE)
    journal = Journal(file)
    for _ in range(10):
        journal.book_error("a text")
    setrlimit(RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            Journal(file, rounds=1)
    finally:
        setrlimit(RLIMIT_FSIZE, before)
    assert len(read_lines(file)) == 10


def test_what_heads_and_leaders_reject_is_set_aside_too(memory_grid, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.round = 2
    inner = memory_grid({n: answering(rejected=n % 3) for n in (1, 2, 3)})
    grid = plain_grid(inner, deadline=5, journal=journal)
    grid.send_and_receive(messages_to([1, 2, 3]))
    journal.book_set_aside(7, "train", "its norm", "strategy")
    assert journal.set_aside == 4
    grid.send_and_receive(messages_to([1]))
    assert journal.set_aside == 5


def test_a_journal_that_is_closed_is_not_stopped(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        pass
    journal.stop()  # Flower ends the process of a run that is over, too
    assert (tmp_path / "journal.jsonl").read_text() == ""


def test_each_stage_reports_phase_node_stage_and_reason(memory_grid, tmp_path):
    def nameless(message):
        return RecordDict({"junk": MetricRecord({"loss": 1.0})})

    def large(message):
        return RecordDict({f"metrics.{i}": MetricRecord({"loss": 1.0}) for i in range(2000)})

    journal = Journal(tmp_path / "journal.jsonl")
    nodes = {1: silent, 2: broken, 3: nameless, 4: large, 5: nameless}
    grid = screening_grid(memory_grid(nodes), deadline=0.5, journal=journal)
    grid.send_and_receive(messages_to([1, 2, 3, 4]))
    set_aside(grid, 5, "train", "its votes are missing")
    found = {
        line.get("failed") or line["set_aside"]: (line["reply_to"], line["stage"], line["reason"])
        for line in read_lines(tmp_path / "journal.jsonl")
        if "stage" in line
    }
    assert {node: about[:2] for node, about in found.items()} == {
        "1": ("train", "transport"),
        "2": ("train", "node"),
        "3": ("train", "screening"),
        "4": ("train", "transport"),
        "5": ("train", "strategy"),
    }
    assert all(reason for _, _, reason in found.values())
    assert "no data" in found["2"][2]


@pytest.mark.parametrize("code", [SET_ASIDE, UNREADABLE])
def test_a_nodes_error_is_its_own_whatever_code_it_has(memory_grid, tmp_path, code):
    class Hiding(memory_grid):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                reply.error = Error(code, "I hide")
                yield reply

    journal, inner = Journal(tmp_path / "journal.jsonl"), Hiding({1: broken})
    plain_grid(inner, deadline=5, journal=journal).send_and_receive(messages_to([1]))
    failed = [line for line in read_lines(tmp_path / "journal.jsonl") if "failed" in line]
    assert [(line["stage"], line["reason"]) for line in failed] == [("node", "I hide")]
