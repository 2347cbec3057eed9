"""Nodes are called by name in the log and in errors."""

import logging

import pytest
from flwr.common import log

from flwr_distill.server.names import named, names_in_log
from flwr_distill.task.errors import ReportedError
from tests.errors import at

NODE, OTHER = 2**64 - 5, 7_000_000_000_000_000_001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Node {NODE} failed in train: x", "ward-3 failed in train: x"),
        (f"Reply of node {NODE} to train", "Reply of ward-3 to train"),
        (f"[{NODE}, {OTHER}]", f"[ward-3, {OTHER}]"),
        (f"Node {OTHER}, run {NODE}0", f"Node {OTHER}, run {NODE}0"),
    ],
)
def test_ids_of_known_nodes_are_replaced_and_others_stay(text, expected):
    assert named(text, {str(NODE): "ward-3"}.get) == expected


def test_log_and_errors_have_names_while_a_run_lasts(flower_log):
    names = {}

    def run():
        names[NODE] = "ward %d"  # met after the run began; a name is no format
        log(logging.WARNING, "Node %d failed", NODE)
        raise ValueError(f"node {NODE} has no address")

    with pytest.raises(ValueError, match=r"^ward %d has no address$"), names_in_log(names):
        run()
    log(logging.WARNING, "Node %d failed", NODE)
    assert flower_log.messages == ["ward %d failed", f"Node {NODE} failed"]


def test_the_fields_of_an_error_have_names_too():
    error = ReportedError(f"node {NODE} is away", where=f"node {NODE}", value=3)
    check = at("ward-3", value=3, problem="ward-3 is away")
    with pytest.raises(ReportedError, check=check), names_in_log({NODE: "ward-3"}):
        raise error
