"""What a SuperNode's log tells its supervisor, in the words of the Flower that is installed."""

import inspect
import logging
from typing import Any

import pytest
from flwr.server.superlink.fleet.grpc_rere import fleet_servicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.supercore.exit import exit as flower_exit
from flwr.supernode import start_client_internal

from flwr_distill.node.flower.supernode import _Reporter
from flwr_distill.node.notes import Notes


def reports(*records: tuple[int, str]) -> list[Any]:
    """The reports that these log records lead to."""
    ours, theirs = Notes.pair()
    reporter = _Reporter(theirs)
    for level, text in records:
        reporter.handle(logging.LogRecord("flwr", level, "", 0, text, None, None))
    found = []
    while ours.is_waiting():
        found.append(tuple(ours.receive(60)))
    return found


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (start_client_internal, "SuperNode ID: %s"),
        (start_client_internal, "Failed to receive message %s: %s"),
        (message_handler, "No SuperNode found with the given public key"),
        (fleet_servicer, "All SuperNodes must be registered via the CLI"),
        (flower_exit, "Exit Code: {code}"),
    ],
)
def test_flower_1_32_1_still_says_it_in_these_words(module: Any, text: str) -> None:
    assert text in inspect.getsource(module)


def test_being_online_is_told_with_flowers_node_id() -> None:
    assert reports((logging.INFO, "SuperNode ID: 123")) == [("online", 123)]


def test_what_no_new_start_mends_is_told_before_the_node_is_online_and_not_after() -> None:
    refused = (logging.ERROR, "details = No SuperNode found with the given public key.")
    exited = (logging.ERROR, "Exit Code: 302\nUnable to parse the private key file.\nSee ...")
    ((first, remedy),) = reports(refused)
    assert first == "unfit"
    assert "flwr-distill register" in remedy
    assert reports(exited) == [("unfit", "Unable to parse the private key file.")]
    assert reports((logging.INFO, "SuperNode ID: 1"), refused, exited) == [("online", 1)]


def test_a_refusal_that_passes_is_not_told() -> None:
    assert reports((logging.ERROR, "SuperNode with node ID 5 could not be activated.")) == []
